"""The outcome of a vote: what every rank said, the same on all of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Vote"]


@dataclass(frozen=True)
class Vote:
    """What the ranks of a control said in one round of `Control.vote`; equal on all of them.

    Args:
        minimum: Smallest value, so that what one rank cannot do none does.
        values: Value of each rank, in ascending order of the ranks.
        reasons: Text of each rank, in the same order; empty where a rank gave none.
    """

    minimum: int
    values: tuple[int, ...]
    reasons: tuple[str, ...]
