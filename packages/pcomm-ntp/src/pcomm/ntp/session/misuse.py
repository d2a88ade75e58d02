"""Errors of calls that a session cannot answer."""

from __future__ import annotations

from pcomm.core.errors import ClosedError, ConfigError

__all__ = ["closed", "given", "over", "speed", "without"]


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


def speed(rank: int, found: float) -> ConfigError:
    """The error of a speed that no rank of the job can have."""
    return ConfigError(
        f"Session.set_speed: rank {rank}, speed {found}",
        found="a rank that the job does not have, or a speed that is not above 0 and at most 1",
        why="Units are dealt out in proportion to speeds, relative to the fastest rank.",
        fix="Give a global rank, and the time of the fastest rank over that of this one.",
    )


def over(asked: str, number: int) -> ConfigError:
    """The error of a call on an attempt whose step is applied."""
    return ConfigError(
        f"{asked} in the attempt at step {number}",
        found="a step that is applied already",
        why="Each step is applied once; the next one has an attempt of its own.",
        fix="Call it before commit(), and commit() once.",
    )


def closed(asked: str) -> ClosedError:
    """The error of a call on a session that was closed."""
    return ClosedError(
        asked,
        found="a session that was closed",
        why="Its groups are gone.",
        fix="Make another session.",
    )


def without(name: str) -> ClosedError:
    """The error of a session that has no such thing now."""
    return ClosedError(
        f"Session: {name}",
        found=f"no {name}",
        why="A rank without units has no model, and a session that ended has no groups.",
        fix="Ask within an attempt; `is_idle` tells whether the rank has units.",
    )
