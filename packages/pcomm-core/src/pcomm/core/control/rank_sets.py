"""Sets of ranks as short text: part of keys, of errors, and of the record of a generation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["parsed", "spelled", "word_for"]

_LONGEST_WORD = 40


def spelled(ranks: Sequence[int]) -> str:
    """Ascending ranks as runs: `0-3,6` for 0, 1, 2, 3 and 6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parsed(text: str) -> tuple[int, ...]:
    """The ranks that `spelled` wrote."""
    ranks: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


def word_for(ranks: Sequence[int]) -> str:
    """A short word that no other set of ranks has: the runs, or a digest where they are long."""
    text = spelled(ranks)
    if len(text) <= _LONGEST_WORD:
        return text
    return f"{len(ranks)}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
