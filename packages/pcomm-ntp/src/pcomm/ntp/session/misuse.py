"""Errors of calls that a session cannot answer."""

from __future__ import annotations

from pcomm.core.errors import ClosedError, ConfigError

__all__ = ["given", "without"]


def given(rank: int | None) -> int:
    """The rank, if it was given."""
    if rank is None:
        raise ConfigError(
            "Session: rank",
            found="a function that connects to the store, and no rank",
            why="The function does not tell which rank this process is.",
            fix="Give rank=, or a RankPlace.",
        )
    return rank


def without(name: str) -> ClosedError:
    """The error of a session that has no such thing now."""
    return ClosedError(
        f"Session: {name}",
        found=f"no {name}",
        why="A rank without units has no model, and a session that ended has no groups.",
        fix="Ask within an attempt; `is_idle` tells whether the rank has units.",
    )
