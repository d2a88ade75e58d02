"""Errors that other ranks caused: which they are, and how often the same one may come again."""

from __future__ import annotations

from pcomm.core.errors import FencedError, PeerError, PeerTimeoutError
from pcomm.ntp.session.store_errors import StoreLostError
from pcomm.ntp.session.suspicion import SuspectedFailure

__all__ = ["Setbacks", "is_setback"]

# Generations in a row without a step, of the same ranks, before the error counts as no accident.
_MOST_IN_VAIN = 5


def is_setback(error: BaseException) -> bool:
    """Whether an error means that other ranks are gone, and not that this one cannot go on."""
    if isinstance(error, FencedError | StoreLostError):
        return False
    return isinstance(error, PeerError | PeerTimeoutError)


class Setbacks:
    """Counts the setbacks of this rank since the ranks or the step were others. Local."""

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._applied, self._count = -1, 0

    def count(self, error: BaseException, ranks: tuple[int, ...], applied: int) -> None:
        """Count a setback; raises one that has come again and again.

        Args:
            error: The setback.
            ranks: Ranks of the generation.
            applied: Number of steps that are applied.
        """
        if not isinstance(error, SuspectedFailure | PeerTimeoutError):
            # Another rank has met an error, and leaves if it meets the same one for ever.
            return
        if (ranks, applied) != (self._ranks, self._applied):
            self._ranks, self._applied, self._count = ranks, applied, 0
        self._count += 1
        if self._count > _MOST_IN_VAIN:
            raise error
