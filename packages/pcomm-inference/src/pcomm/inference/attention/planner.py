"""Makes the plan of a step: in the first attention layer, which keeps it for the others."""

# Shape suffixes: N requests of one call, U units of the pool that hold their keys.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.inference.attention.masks import CausalMask, tail_mask
from pcomm.inference.attention.plan import AttentionPlan, KeyPlaces, OneTokenCall, PromptChunk
from pcomm.inference.attention.rounding import fewest_rows, rounded_keys
from pcomm.inference.memory import KVMemory
from pcomm.inference.step_batch import StepBatch

__all__ = ["places_of", "plan_of", "tokens_of_a_call"]

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
    key = (plan_of, keys.shape[1:], keys.dtype, q_THK.shape[1], q_THK.dtype)
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


def places_of(
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
    size = 1 if is_by_block else block_size
    offsets = torch.arange(size, device=tables_NB.device)
    units_NU = (tables_NB.unsqueeze(-1) * size + offsets).flatten(1)
    unit = block_size // size
    num_units = -(-num_keys // unit)
    units_NU = torch.nn.functional.pad(units_NU, (0, max(0, num_units - units_NU.shape[1])))
    starts_U = torch.arange(num_units, device=tables_NB.device) * unit
    return torch.where(starts_U < lengths_N1, units_NU[:, :num_units], units_NU[:, :1])


class _Planner:
    def __init__(self, batch: StepBatch, memory: KVMemory, q_THK: Tensor) -> None:
        self.batch, self.q_THK, self.block_size = batch, q_THK, memory.keys.shape[1]
        self.token_bytes = 2 * memory.keys[0, 0].nbytes
        self.rows_per_token = q_THK.shape[1] // memory.keys.shape[2]
        # On a GPU nothing clears the rest of a block, so blocks are not read whole.
        self.is_by_block = memory.keys.is_cpu
        self.news = [stop - start for start, stop in pairwise(batch.cu_seqlens)]
        self.totals = [c + new for c, new in zip(batch.context_lens, self.news, strict=True)]

    def plan(self) -> AttentionPlan:
        chosen = [i for i, new in enumerate(self.news) if new > 1]
        return AttentionPlan(
            self._begun_blocks() if self.is_by_block else None,
            tuple(map(self._one_token_call, self._groups())),
            tuple(map(self._chunk, chosen)),
            self._causal_mask(chosen) if chosen else None,
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
        rows, columns = torch.tensor(places).unbind(1)
        return self.batch.block_tables_NB[rows, columns].long()

    def _groups(self) -> Iterator[list[int]]:
        """Requests with one new token that read the same number of keys, as many as may share."""
        by_keys: dict[int, list[int]] = {}
        for i, new in enumerate(self.news):
            if new == 1:
                by_keys.setdefault(rounded_keys(self.totals[i]), []).append(i)
        for num_keys, members in by_keys.items():
            count = max(1, _CALL_BYTES // (num_keys * self.token_bytes))
            for start in range(0, len(members), count):
                yield members[start : start + count]

    def _one_token_call(self, members: list[int]) -> OneTokenCall:
        totals = [self.totals[i] for i in members]
        num_keys = rounded_keys(totals[0])
        is_full = all(total == num_keys for total in totals)
        is_all = len(members) == len(self.news)
        rows = [self.batch.cu_seqlens[i] for i in members]
        return OneTokenCall(
            None if is_all else torch.tensor(rows, device=self.q_THK.device),
            self._places(members),
            None if is_full else tail_mask(totals, num_keys, like=self.q_THK),
        )

    def _chunk(self, i: int) -> PromptChunk:
        batch = self.batch
        return PromptChunk(
            batch.cu_seqlens[i], self.news[i], batch.context_lens[i], self._places([i])
        )

    def _places(self, members: Sequence[int]) -> KeyPlaces:
        tables_NB = self.batch.block_tables_NB
        if len(members) < len(self.news):
            tables_NB = tables_NB[torch.tensor(members, device=tables_NB.device)]
        totals = [self.totals[i] for i in members]
        num_keys = rounded_keys(max(totals))
        units_NU = places_of(
            tables_NB,
            torch.tensor(totals, device=tables_NB.device).unsqueeze(1),
            num_keys,
            self.block_size,
            is_by_block=self.is_by_block,
        )
        return KeyPlaces(units_NU.flatten(), len(members), num_keys, self.is_by_block)

    def _causal_mask(self, chosen: Sequence[int]) -> CausalMask:
        most = tokens_of_a_call(self.rows_per_token)
        num_tokens = min(most, max(self.news[i] for i in chosen))
        # Rows that only fill a call up to the fewest have a place in the mask, too.
        num_tokens = max(num_tokens, fewest_rows(self.q_THK.dtype))
        firsts = [
            self.batch.context_lens[i] + (self.news[i] - 1) // most * most for i in chosen
        ]
        return CausalMask(num_tokens, self.rows_per_token, max(firsts), like=self.q_THK)
