"""How many keys and how many rows a call has, so that a row has the same bits in each call.

Torch's attention on a CPU reads keys in parts of 512 from the first one on, and adds up the values
of a part in an order that depends on the number of its keys: with other numbers than those below a
row of a long chunk differs in the last bit from the same row of a short one. It also multiplies
fewer than four rows by another routine, which is slower than that for four.

Seen with torch 2.13 on a processor with AVX-512 BF16. On another one the numbers still make a row
independent of the rest of the batch, since requests share a call only where their numbers are equal.
"""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["MOST_ADDED", "fewest_rows", "rounded_keys"]

_PART = 512
_LAST_PARTS = (64, 128, 192, 384, 448, 512)
_FEWEST_ROWS = 4

MOST_ADDED = max(longer - shorter for shorter, longer in pairwise((0, *_LAST_PARTS))) - 1
"""Most keys that `rounded_keys` adds."""


def rounded_keys(num_keys: int) -> int:
    """The number of keys that a call reads for a request that has `num_keys`, at least one."""
    full, rest = divmod(num_keys - 1, _PART)
    return full * _PART + next(length for length in _LAST_PARTS if length > rest)


def fewest_rows(dtype: torch.dtype) -> int:
    """The number of rows that a call has at least, for each head of the keys."""
    return _FEWEST_ROWS if dtype.itemsize == 2 else 1
