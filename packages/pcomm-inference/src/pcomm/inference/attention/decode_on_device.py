"""One new token of each request, with nothing decided by the host, so that graphs can hold it."""

# Shape suffixes: N requests, H query heads, G key heads, R query heads of a key head, L keys that
# the block tables have places for, K head dim, S tokens of a block.

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.inference.attention.attend import attend_rows
from pcomm.inference.attention.planner import units_of
from pcomm.inference.memory import KVMemory
from pcomm.inference.step_batch import StepBatch

__all__ = ["decode_on_device"]


def decode_on_device(
    q_NHK: Tensor, memory: KVMemory, batch: StepBatch, scale: float | None
) -> Tensor:
    """`[N, H, K]`, contiguous: one new token of every request. No wait for the device.

    Shapes depend on the shapes of the batch alone, so that a captured graph serves every step with
    as many requests and as wide block tables. Keys up to the end of the tables are copied, so the
    engine hands tables no wider than the longest request of the step (or of the graph) needs.

    Tested on a CPU, and with tensors that have no numbers; it has not run on a GPU yet.

    Args:
        q_NHK: Queries of the new tokens.
        memory: Blocks of the layer, which hold the new tokens already.
        batch: Tokens of the step.
        scale: Factor of the scores; None for torch's.
    """
    num_requests, num_blocks = batch.block_tables_NB.shape
    block_size, num_heads, head_dim = memory.keys.shape[1:]
    num_keys = num_blocks * block_size
    lengths_N1 = batch.context_lens_N.unsqueeze(1) + 1
    slots_NL = units_of(batch.block_tables_NB, lengths_N1, num_keys, block_size, is_by_block=False)
    is_behind_NL = torch.arange(num_keys, device=slots_NL.device) >= lengths_N1
    mask_NL = q_NHK.new_zeros(num_requests, num_keys).masked_fill_(is_behind_NL, -torch.inf)

    def copied(pool: Tensor) -> Tensor:
        found = pool.view(-1, num_heads, head_dim).index_select(0, slots_NL.flatten())
        tokens = found.view(num_requests, num_keys, num_heads, head_dim)
        return tokens.transpose(1, 2).to(q_NHK.dtype)

    mixed_NGRK = attend_rows(
        q_NHK.view(num_requests, num_heads, -1, head_dim),
        copied(memory.keys),
        copied(memory.values),
        mask_NL[:, None, None],
        scale,
    )
    return mixed_NGRK.reshape(q_NHK.shape).contiguous()
