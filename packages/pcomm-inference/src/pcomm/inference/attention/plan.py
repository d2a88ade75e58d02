"""Which calls of torch's attention serve a step on a CPU, and where the keys lie.

The plan is made in the first attention layer of a step, which keeps it for the others. A row has
the same bits in each call because numbers of keys and rows are rounded. Torch's attention on a CPU
reads keys in parts of 512 from the first one on, and adds up the values of a part in an order that
depends on the number of its keys: with other numbers than those below a row of a long chunk differs
in the last bit from the same row of a short one. It handles rows in parts of 32 or 64, and
multiplies fewer than four rows by another routine, which takes longer than the one for four.

Seen with torch 2.13 on a processor with AVX-512 BF16. On one with AVX-512 alone, and with AVX2,
single elements of long chunks differ from those of short ones. A row still does not depend on the
rest of the batch, since requests share a call only where their numbers are equal.

With a window the first key of a call is that which its first token still sees, or the begin of the
block of that key. Parts of 512 begin there, so they differ for other chunks.
"""

# Shape suffixes: N requests of one call, B blocks of the pool that hold their keys, L keys, M rows.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.inference.model import KVMemory, StepBatch

__all__ = [
    "MOST_ADDED",
    "AttentionPlan",
    "CausalMask",
    "ChunkCall",
    "ChunkPlan",
    "DecodeCall",
    "KVIndices",
    "TailMasks",
    "blocks_of",
    "plan_of",
    "rounded_keys",
    "rounded_rows",
    "tokens_of_a_call",
]


@dataclass(frozen=True)
class KVIndices:
    """Where the keys of some requests lie in the pool.

    Attributes:
        blocks: int, blocks of the pool, B for each of N requests. Blocks behind the last token of a
            request are its first block once more.
        num_requests: N.
        num_keys: L, the number of keys that are read of each request, from the first on that any
            of its new tokens sees.
    """

    blocks: Tensor
    num_requests: int
    num_keys: int


@dataclass(frozen=True)
class DecodeCall:
    """Requests with one new token each, also of a prompt, served by one call of torch's attention.

    Attributes:
        rows_N: int64, their places among the tokens of the step; None if they are all of them.
        indices: Places of their keys.
        mask_N11L: Mask of keys behind the last token, and of those before its window; None if there
            are none.
        lengths: Number of keys of each request, from the first one that is read to its newest.
    """

    rows_N: Tensor | None
    indices: KVIndices
    mask_N11L: Tensor | None
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class ChunkCall:
    """A few neighbouring tokens of a chunk, served by one call of torch's attention.

    Attributes:
        start: Place of the first of them among the tokens of the step.
        num_tokens: Number of them.
        first_key: Place of the first key of the call among those of the chunk.
        num_keys: Number of keys of the call.
        own_key: Place of the first token's own key among those of the call.
    """

    start: int
    num_tokens: int
    first_key: int
    num_keys: int
    own_key: int


@dataclass(frozen=True)
class ChunkPlan:
    """The calls for a request with several new tokens: of a prompt, or drafts.

    Attributes:
        indices: Places of the keys of all of them.
        calls: The calls that serve them.
    """

    indices: KVIndices
    calls: tuple[ChunkCall, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """What one step does in every attention layer with blocks and heads of one shape.

    Attributes:
        partial_blocks: int, blocks that are begun and not filled; None if there are none.
        decode_calls: Calls for the requests with one new token.
        chunks: Requests with several new tokens.
        causal_mask: Masks of the calls for the chunks; None if there are none.
    """

    partial_blocks: Tensor | None
    decode_calls: tuple[DecodeCall, ...]
    chunks: tuple[ChunkPlan, ...]
    causal_mask: CausalMask | None


# Bytes of keys and values that requests with one new token share a call for: a copy of so many
# stays in the cache of a core until it is read. Fewer bytes are more calls.
_CALL_BYTES = 512 << 10
# Rows of a call for a chunk. With more of them more is computed behind the diagonal, with fewer the
# keys are read more often.
_CHUNK_ROWS = 256


def plan_of(
    batch: StepBatch, memory: KVMemory, q_THK: Tensor, window: int | None = None
) -> AttentionPlan:
    """The plan for layers with such blocks, queries and window, kept in `batch` for the next."""
    keys = memory.keys
    key = (plan_of, keys.shape[1:], keys.dtype, q_THK.shape[1:], q_THK.dtype, window)
    plan: AttentionPlan | None = batch.prepared.get(key)
    if plan is None:
        plan = batch.prepared[key] = _Planner(batch, memory, q_THK, window).plan()
    return plan


def tokens_of_a_call(rows_per_token: int) -> int:
    """Number of new tokens of a chunk that one call serves, by the query heads of a key head."""
    return max(1, _CHUNK_ROWS // rows_per_token)


def blocks_of(
    tables_NB: Tensor,
    lengths_N1: Tensor,
    num_keys: int,
    block_size: int,
    *,
    firsts_N1: Tensor | None = None,
) -> Tensor:
    """Blocks of the pool that hold `num_keys` keys of each request, a row for each.

    Args:
        tables_NB: int, blocks of the requests in the order of their tokens.
        lengths_N1: int, number of tokens of each request, at least 1.
        num_keys: Number of keys to read of each. Behind the last block that has a token of the
            request stands its first once more, whose keys are its own.
        block_size: Number of tokens of a block.
        firsts_N1: int64, place of the first key that is read of each request, the first one of a
            block; None for 0.
    """
    if firsts_N1 is not None:
        places_NB = firsts_N1 + torch.arange(0, num_keys, block_size, device=tables_NB.device)
        columns_NB = (places_NB // block_size).clamp_(max=tables_NB.shape[1] - 1)
        blocks_NB = tables_NB.gather(1, columns_NB)
        return torch.where(places_NB < lengths_N1, blocks_NB, blocks_NB[:, :1])
    num_blocks = -(-num_keys // block_size)
    if (missing := num_blocks - tables_NB.shape[1]) > 0:
        tables_NB = torch.nn.functional.pad(tables_NB, (0, missing))
    starts_B = torch.arange(0, num_blocks * block_size, block_size, device=tables_NB.device)
    return torch.where(starts_B < lengths_N1, tables_NB[:, :num_blocks], tables_NB[:, :1])


class _Planner:
    def __init__(
        self, batch: StepBatch, memory: KVMemory, q_THK: Tensor, window: int | None
    ) -> None:
        self.window = window
        self.batch, self.like, self.block_size = batch, q_THK, memory.keys.shape[1]
        self.token_bytes = memory.keys[0, 0].nbytes + memory.values[0, 0].nbytes
        self.rows_per_token = q_THK.shape[1] // memory.keys.shape[2]
        self.news = [stop - start for start, stop in pairwise(batch.cu_seqlens)]
        self.totals = [c + new for c, new in zip(batch.context_lens, self.news, strict=True)]
        self.firsts, self.lengths = [0] * len(self.totals), self.totals
        if window is not None:
            self.firsts = [self._first_key(context) for context in batch.context_lens]
            self.lengths = [a - b for a, b in zip(self.totals, self.firsts, strict=True)]
        self.calls = {i: self._calls(i) for i, new in enumerate(self.news) if new > 1}
        self.num_keys = [rounded_keys(length) for length in self.lengths]
        for i, calls in self.calls.items():
            self.num_keys[i] = max(call.first_key + call.num_keys for call in calls)
        if len(self.totals) == 1:
            self.blocks_NB = self._blocks_of_one()
        else:
            self.blocks_NB = blocks_of(
                batch.block_tables_NB,
                self._tensor(self.totals).unsqueeze(1),
                max(self.num_keys),
                self.block_size,
                firsts_N1=self._tensor(self.firsts).unsqueeze(1) if any(self.firsts) else None,
            )

    def _first_key(self, position: int) -> int:
        """Place in its request of the first key that is read for a token and those after it."""
        if self.window is None:
            return 0
        first = max(0, position + 1 - self.window)
        return first - first % self.block_size

    def _calls(self, i: int) -> tuple[ChunkCall, ...]:
        """The calls for the chunk of a request."""
        found, most, start = [], tokens_of_a_call(self.rows_per_token), self.batch.cu_seqlens[i]
        for done in range(0, self.news[i], most):
            num_tokens = min(most, self.news[i] - done)
            position = self.batch.context_lens[i] + done
            first = self._first_key(position)
            found.append(
                ChunkCall(
                    start=start + done,
                    num_tokens=num_tokens,
                    first_key=first - self.firsts[i],
                    num_keys=rounded_keys(position + num_tokens - first),
                    own_key=position - first,
                )
            )
        return tuple(found)

    def _blocks_of_one(self) -> Tensor:
        """`blocks_of` for one request, whose length is known here: fewer small operations."""
        blocks_1B, size = self.batch.block_tables_NB, self.block_size
        first = self.firsts[0] // size
        num_used, num_read = -(-self.lengths[0] // size), -(-self.num_keys[0] // size)
        used_1U = blocks_1B[:, first : first + num_used]
        if num_used == num_read:
            return used_1U
        return torch.cat([used_1U, used_1U[:, :1].expand(1, num_read - num_used)], 1)

    def plan(self) -> AttentionPlan:
        ones = [i for i, new in enumerate(self.news) if new == 1]
        masks = TailMasks([self.lengths[i] for i in ones], self.window, like=self.like)
        return AttentionPlan(
            self._partial_blocks(),
            tuple(self._decode_call(group, masks) for group in self._groups(ones)),
            tuple(ChunkPlan(self._indices([i]), self.calls[i]) for i in self.calls),
            self._causal_mask() if self.calls else None,
        )

    def _partial_blocks(self) -> Tensor | None:
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

    def _decode_call(self, members: Sequence[int], masks: TailMasks) -> DecodeCall:
        rows = None
        if len(members) < len(self.news):
            rows = self._tensor([self.batch.cu_seqlens[i] for i in members])
        lengths = tuple(self.lengths[i] for i in members)
        mask = masks.of_call(lengths, self.num_keys[members[0]])
        return DecodeCall(rows, self._indices(members), mask, lengths)

    def _indices(self, members: Sequence[int]) -> KVIndices:
        num_keys = self.num_keys[members[0]]
        num_blocks = -(-num_keys // self.block_size)
        if len(members) == 1:
            blocks = self.blocks_NB[members[0], :num_blocks]
        else:
            blocks = self.blocks_NB[self._tensor(members), :num_blocks].flatten()
        return KVIndices(blocks, len(members), num_keys)

    def _causal_mask(self) -> CausalMask:
        every = [call for calls in self.calls.values() for call in calls]
        num_rows = max(call.num_tokens for call in every) * self.rows_per_token
        # Rows that are added to a call have a place in the mask, too, even if the chunk is short.
        num_rows += rounded_rows(1, self.like.dtype)
        num_tokens = -(-num_rows // self.rows_per_token)
        last_own_key = max(call.own_key for call in every)
        return CausalMask(
            num_tokens, self.rows_per_token, last_own_key, self.window, like=self.like
        )

    def _tensor(self, values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(values, device=self.like.device)


class TailMasks:
    """Masks of the keys behind and before those that a token sees, as parts of one tensor.

    Args:
        lengths: Number of keys of each request, from the first one that is read to its newest.
        window: Number of keys that a token sees; None for all.
        like: Tensor whose dtype and device the masks get.
    """

    def __init__(self, lengths: Sequence[int], window: int | None, *, like: Tensor) -> None:
        self.longest, self.window = max(lengths, default=0), window
        self.mask = like.new_zeros(self.longest + MOST_ADDED)
        self.mask[self.longest :] = -torch.inf
        if window is not None:
            self.mask[: max(0, self.longest - window)] = -torch.inf

    def of_call(self, lengths: Sequence[int], num_keys: int) -> Tensor | None:
        """`[N, 1, 1, L]`; None if every request sees L keys.

        Args:
            lengths: Number of keys of each request of the call.
            num_keys: L.
        """
        is_in_window = self.window is None or num_keys <= self.window
        if is_in_window and all(length == num_keys for length in lengths):
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
        last_own_key: Largest place that the first token of a call has among the keys of its call.
        window: Number of keys that a token sees; None for all.
        like: Tensor whose dtype and device the mask gets.
    """

    def __init__(
        self,
        num_tokens: int,
        rows_per_token: int,
        last_own_key: int,
        window: int | None,
        *,
        like: Tensor,
    ) -> None:
        self.last_own_key = last_own_key
        # Row i begins with `last_own_key + i + 1` zeros.
        mask = like.new_zeros(num_tokens, last_own_key + num_tokens + MOST_ADDED)
        every = torch.ones_like(mask, dtype=torch.bool)
        is_unseen = every.triu(last_own_key + 1)
        if window is not None:
            is_unseen |= every.tril(last_own_key - window)
        self.mask = mask.masked_fill_(is_unseen, -torch.inf).repeat_interleave(rows_per_token, 0)

    def of_call(self, own_key: int, num_rows: int, num_keys: int) -> Tensor:
        """`[M, L]`, a view: the token at place `own_key + i` sees its window up to its own key.

        Args:
            own_key: Place of the first token among the keys of the call.
            num_rows: M.
            num_keys: L.
        """
        start = self.last_own_key - own_key
        return self.mask[:num_rows, start : start + num_keys]


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
    """The number of rows for each key head that a call has for `num_rows`: up to three more."""
    is_short = dtype.itemsize == 2 and 0 < num_rows % _ROWS_PART < _FEWEST_ROWS
    return num_rows // _ROWS_PART * _ROWS_PART + _FEWEST_ROWS if is_short else num_rows
