"""The error of a rank that failed, died or hung."""

from __future__ import annotations

import signal

__all__ = ["RankError", "end_of"]


class RankError(Exception):
    """A rank failed, died or hung; the message starts with what happened there.

    Args:
        message: The failing rank, its traceback, and what the others were doing.
        error: The exception of the failing rank, where it could be carried over.
    """

    def __init__(self, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.error = error


def end_of(exit_code: int | None) -> str:
    """How a process ended, in words. Local."""
    if exit_code is not None and exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:  # most real-time signals have no name
            return f"killed by signal {-exit_code}"
    return f"exit code {exit_code}"
