"""The tokens of one step: of many requests, each with one token or with a chunk of its prompt."""

# Shape suffixes: T tokens of the step, N requests, B blocks of the longest request, L rows of
# logits that are wanted.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["StepBatch"]


@dataclass(frozen=True)
class StepBatch:
    """A ragged batch: the new tokens of N requests one after the other, without padding.

    Requests that decode (one new token each, something computed before) come first, then those
    with chunks of a prompt. Tensors are on the device of the model. Where a step is replayed from a
    CUDA graph, tensors are static buffers that are padded with requests that write to a block and a
    slot which belong to no request; `is_decode` is then true and the host's numbers are those of
    the capture, which only say the shape.

    Attributes:
        tokens_T: int64, the new tokens.
        positions_T: int64, the position of each in its request, from 0.
        cu_seqlens: `N + 1` offsets of the requests in the T tokens, on the host.
        context_lens: Number of tokens of each request whose keys, values and states are in memory
            before this step, on the host.
        context_lens_N: int32, the same on the device.
        block_tables_NB: int32, the blocks of each request in the order of its tokens; the entries
            behind the last one are 0. They already cover the new tokens. `[N, 0]` for a model
            without keys and values.
        kv_slots_T: int64, where keys and values of each new token go: the number of the block times
            the block size, plus the offset in the block.
        first_blocks: The first block of each request whose blocks are neighbours in ascending
            order, so that its keys and values are one slice of memory; None for one whose blocks
            are scattered. On the host.
        state_slots_N: int64, the state slot of each request.
        logits_rows: int64 `[L]`, the tokens of the T whose logits are wanted.
        prepared: Values that the first layer of a kind computed from the fields above for those
            after it, by a key of that kind. Empty in a new batch, and in one that a graph is
            captured of.
    """

    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens: tuple[int, ...]
    context_lens: tuple[int, ...]
    context_lens_N: Tensor
    block_tables_NB: Tensor
    kv_slots_T: Tensor
    first_blocks: tuple[int | None, ...]
    state_slots_N: Tensor
    logits_rows: Tensor
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_requests(self) -> int:
        """N."""
        return len(self.context_lens)

    @property
    def is_decode(self) -> bool:
        """Whether each request has exactly one new token and something before it."""
        return self.cu_seqlens[-1] == self.num_requests and 0 not in self.context_lens
