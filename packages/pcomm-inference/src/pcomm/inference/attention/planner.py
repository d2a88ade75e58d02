"""Makes the plan of a step: in the first attention layer, which keeps it for the others."""

# Shape suffixes: N requests of one call, U units of the pool that hold their keys.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.inference.attention.masks import CausalMask, TailMasks
from pcomm.inference.attention.plan import AttentionPlan, KeyPlaces, OneTokenCall, PromptChunk
from pcomm.inference.attention.rounding import rounded_keys, rounded_rows
from pcomm.inference.memory import KVMemory
from pcomm.inference.step_batch import StepBatch

__all__ = ["plan_of", "tokens_of_a_call", "units_of"]

# Bytes of keys and values that requests with one new token share a call for: a copy of so many
# stays in the cache of a core until it is read. Fewer bytes are more calls.
_CALL_BYTES = 512 << 10

# Rows of a call for a chunk. With more of them more is computed behind the diagonal, with fewer the
# keys are read more often.
_CHUNK_ROWS = 256


def plan_of(batch: StepBatch, memory: KVMemory, q_THK: Tensor) -> AttentionPlan:
    """The plan for layers with such blocks and queries. Local.

    Args:
        batch: Tokens of the step; it keeps the plan for the next layer.
        memory: Blocks of a layer.
        q_THK: Queries of that layer.
    """
    keys = memory.keys
    key = (plan_of, keys.shape[1:], keys.dtype, q_THK.shape[1:], q_THK.dtype)
    plan: AttentionPlan | None = batch.prepared.get(key)
    if plan is None:
        plan = batch.prepared[key] = _Planner(batch, memory, q_THK).plan()
    return plan


def tokens_of_a_call(rows_per_token: int) -> int:
    """Number of new tokens of a chunk that one call serves.

    Args:
        rows_per_token: Query heads that share a key head.
    """
    return max(1, _CHUNK_ROWS // rows_per_token)


def units_of(
    tables_NB: Tensor, lengths_N1: Tensor, num_keys: int, block_size: int, *, is_by_block: bool
) -> Tensor:
    """Units `[N, U]` of the pool that hold `num_keys` keys of each request. No wait for the device.

    Args:
        tables_NB: int, blocks of the requests in the order of their tokens.
        lengths_N1: int, number of tokens of each request, at least 1.
        num_keys: Number of keys to read of each. Behind the last unit that has a token of the
            request stands its first once more, whose keys are its own.
        block_size: Number of tokens of a block.
        is_by_block: True for blocks, false for tokens.
    """
    units_NU, unit = tables_NB, block_size
    if not is_by_block:
        offsets = torch.arange(block_size, device=tables_NB.device)
        units_NU, unit = (tables_NB.unsqueeze(-1) * block_size + offsets).flatten(1), 1
    num_units = -(-num_keys // unit)
    if (missing := num_units - units_NU.shape[1]) > 0:
        units_NU = torch.nn.functional.pad(units_NU, (0, missing))
    starts_U = torch.arange(0, num_units * unit, unit, device=tables_NB.device)
    return torch.where(starts_U < lengths_N1, units_NU[:, :num_units], units_NU[:, :1])


class _Planner:
    def __init__(self, batch: StepBatch, memory: KVMemory, q_THK: Tensor) -> None:
        self.batch, self.like, self.block_size = batch, q_THK, memory.keys.shape[1]
        self.token_bytes = 2 * memory.keys[0, 0].nbytes
        self.rows_per_token = q_THK.shape[1] // memory.keys.shape[2]
        # On a GPU nothing clears the rest of a block, so blocks are not read whole.
        self.is_by_block = memory.keys.is_cpu
        self.news = [stop - start for start, stop in pairwise(batch.cu_seqlens)]
        self.totals = [c + new for c, new in zip(batch.context_lens, self.news, strict=True)]
        self.num_keys = [rounded_keys(total) for total in self.totals]
        if len(self.totals) == 1 and self.is_by_block:
            self.units_NU = self._blocks_of_one()
        else:
            self.units_NU = units_of(
                batch.block_tables_NB,
                self._tensor(self.totals).unsqueeze(1),
                max(self.num_keys),
                self.block_size,
                is_by_block=self.is_by_block,
            )

    def _blocks_of_one(self) -> Tensor:
        """`units_of` for one request, whose length is known here: fewer small operations."""
        blocks_1B, size = self.batch.block_tables_NB, self.block_size
        num_used, num_read = -(-self.totals[0] // size), -(-self.num_keys[0] // size)
        used_1U = blocks_1B[:, :num_used]
        if num_used == num_read:
            return used_1U
        return torch.cat([used_1U, blocks_1B[:, :1].expand(1, num_read - num_used)], 1)

    def plan(self) -> AttentionPlan:
        chunked = [i for i, new in enumerate(self.news) if new > 1]
        ones = [i for i, new in enumerate(self.news) if new == 1]
        masks = TailMasks([self.totals[i] for i in ones], like=self.like)
        return AttentionPlan(
            self._begun_blocks() if self.is_by_block else None,
            tuple(self._one_token_call(group, masks) for group in self._groups(ones)),
            tuple(map(self._chunk, chunked)),
            self._causal_mask(chunked) if chunked else None,
        )

    def _begun_blocks(self) -> Tensor | None:
        places = []
        for i, (context, total) in enumerate(
            zip(self.batch.context_lens, self.totals, strict=True)
        ):
            index, used = divmod(total, self.block_size)
            if used and index * self.block_size >= context:
                places.append((i, index))
        if not places:
            return None
        rows, columns = self._tensor(places).unbind(1)
        return self.batch.block_tables_NB[rows, columns].long()

    def _groups(self, ones: Sequence[int]) -> Iterator[list[int]]:
        """Requests that read the same number of keys, as many as may share a call."""
        by_keys: dict[int, list[int]] = {}
        for i in ones:
            by_keys.setdefault(self.num_keys[i], []).append(i)
        for num_keys, members in by_keys.items():
            most = max(1, _CALL_BYTES // (num_keys * self.token_bytes))
            for start in range(0, len(members), most):
                yield members[start : start + most]

    def _one_token_call(self, members: Sequence[int], masks: TailMasks) -> OneTokenCall:
        rows = None
        if len(members) < len(self.news):
            rows = self._tensor([self.batch.cu_seqlens[i] for i in members])
        return OneTokenCall(
            rows,
            self._places(members),
            masks.of_call([self.totals[i] for i in members], self.num_keys[members[0]]),
        )

    def _chunk(self, i: int) -> PromptChunk:
        batch = self.batch
        return PromptChunk(
            batch.cu_seqlens[i], self.news[i], batch.context_lens[i], self._places([i])
        )

    def _places(self, members: Sequence[int]) -> KeyPlaces:
        num_keys = self.num_keys[members[0]]
        num_units = -(-num_keys // (self.block_size if self.is_by_block else 1))
        if len(members) == 1:
            units = self.units_NU[members[0], :num_units]
        else:
            units = self.units_NU[self._tensor(members), :num_units].flatten()
        return KeyPlaces(units, len(members), num_keys, self.is_by_block)

    def _causal_mask(self, chunked: Sequence[int]) -> CausalMask:
        most = tokens_of_a_call(self.rows_per_token)
        num_rows = min(most, max(self.news[i] for i in chunked)) * self.rows_per_token
        # Rows that are added to a call have a place in the mask, too, even if the chunk is short.
        num_rows += rounded_rows(1, self.like.dtype)
        num_tokens = -(-num_rows // self.rows_per_token)
        firsts = [self.batch.context_lens[i] + (self.news[i] - 1) // most * most for i in chunked]
        return CausalMask(num_tokens, self.rows_per_token, max(firsts), like=self.like)

    def _tensor(self, values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(values, device=self.like.device)
