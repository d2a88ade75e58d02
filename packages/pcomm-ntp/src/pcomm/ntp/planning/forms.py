"""Forms: the relative speeds of the ranks of a tensor-parallel group, which decide its cuts."""

from __future__ import annotations

from fractions import Fraction

__all__ = ["Form"]

Form = tuple[Fraction, ...]
"""Speed of each rank that is used, over that of the fastest; all 1 for a plain degree."""
