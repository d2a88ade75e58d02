"""Whole numbers in given proportions, without a remainder."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["largest_remainder"]


def largest_remainder(total: int, weights: Sequence[Fraction]) -> tuple[int, ...]:
    """`total` in whole numbers proportional to `weights`, each within 1 of its exact share.

    What is left after rounding down goes to the largest remainders, the earlier of equal ones
    first, so all ranks get the same result.

    Args:
        total: The number to hand out, at least 0.
        weights: A weight of at least 0 for each receiver, not all 0.
    """
    whole = sum(weights, Fraction(0))
    exact = [total * weight / whole for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return tuple(shares)
