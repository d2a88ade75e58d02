"""Masks that are added to scores: zero where a key counts, minus infinity where it does not."""

# Shape suffixes: N requests, L keys, M rows of one call.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.inference.attention.rounding import MOST_ADDED

__all__ = ["CausalMask", "TailMasks"]


class TailMasks:
    """Masks of requests whose keys end before those that are read, as parts of one tensor.

    Args:
        lengths: Number of keys of each request.
        like: Tensor whose dtype and device the masks get.
    """

    def __init__(self, lengths: Sequence[int], *, like: Tensor) -> None:
        self.longest = max(lengths, default=0)
        self.mask = like.new_zeros(self.longest + MOST_ADDED)
        self.mask[self.longest :] = -torch.inf

    def of_call(self, lengths: Sequence[int], num_keys: int) -> Tensor | None:
        """`[N, 1, 1, L]`; None if every request has L keys.

        Args:
            lengths: Number of keys of each request of the call.
            num_keys: L.
        """
        if all(length == num_keys for length in lengths):
            return None
        starts = [self.longest - length for length in lengths]
        rows = [self.mask[start : start + num_keys] for start in starts]
        return (rows[0][None] if len(rows) == 1 else torch.stack(rows))[:, None, None]


class CausalMask:
    """The masks of all calls for chunks of a step, as parts of one tensor.

    It grows with the length of the longest prompt, and not with its square.

    Args:
        num_tokens: Most tokens that a call has.
        rows_per_token: Number of rows that belong to one token, one after the other.
        last_first: Largest position that the first token of a call has in its request.
        like: Tensor whose dtype and device the mask gets.
    """

    def __init__(
        self, num_tokens: int, rows_per_token: int, last_first: int, *, like: Tensor
    ) -> None:
        self.last_first = last_first
        # Row i begins with `last_first + i + 1` zeros.
        mask = like.new_zeros(num_tokens, last_first + num_tokens + MOST_ADDED)
        is_behind = torch.ones_like(mask, dtype=torch.bool).triu_(last_first + 1)
        self.mask = mask.masked_fill_(is_behind, -torch.inf).repeat_interleave(rows_per_token, 0)

    def of_call(self, first: int, num_rows: int, num_keys: int) -> Tensor:
        """`[M, L]`, a view: the token at position `first + i` sees the keys up to its own.

        Args:
            first: Position of the first token of the call in its request.
            num_rows: M.
            num_keys: L.
        """
        start = self.last_first - first
        return self.mask[:num_rows, start : start + num_keys]
