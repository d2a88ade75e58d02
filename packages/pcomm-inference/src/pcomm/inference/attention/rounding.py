"""How many keys and how many rows a call has, so that a row has the same bits in each call.

Torch's attention on a CPU reads keys in parts of 512 from the first one on, and adds up the values
of a part in an order that depends on the number of its keys: with other numbers than those below a
row of a long chunk differs in the last bit from the same row of a short one. It handles rows in
parts of 32 or 64, and multiplies fewer than four rows by another routine, which takes longer than
the one for four.

Seen with torch 2.13 on a processor with AVX-512 BF16. On one with AVX-512 alone, and with AVX2,
single elements of long chunks differ from those of short ones. A row still does not depend on the
rest of the batch, since requests share a call only where their numbers are equal.
"""

from __future__ import annotations

from itertools import pairwise

import torch

__all__ = ["MOST_ADDED", "rounded_keys", "rounded_rows"]

_PART = 512
_LAST_PARTS = (64, 128, 192, 384, 448, 512)
_ROWS_PART = 32
_FEWEST_ROWS = 4

MOST_ADDED = max(longer - shorter for shorter, longer in pairwise((0, *_LAST_PARTS))) - 1
"""Most keys that `rounded_keys` adds."""


def rounded_keys(num_keys: int) -> int:
    """The number of keys that a call reads for a request that has `num_keys`, at least one."""
    full, rest = divmod(num_keys - 1, _PART)
    return full * _PART + next(length for length in _LAST_PARTS if length > rest)


def rounded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """The number of rows for each key head that a call has for `num_rows`: up to three more.

    Args:
        num_rows: Number of queries that read one key head, at least one.
        dtype: Data type of the queries.
    """
    is_short = dtype.itemsize == 2 and 0 < num_rows % _ROWS_PART < _FEWEST_ROWS
    return num_rows // _ROWS_PART * _ROWS_PART + _FEWEST_ROWS if is_short else num_rows
