"""Requests with random queries, keys and values, and the blocks that they are written to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.inference.attention.on_device import attend_on_device, decode_by_copies
from pcomm.inference.attention.paged_attention import paged_attention
from pcomm.inference.attention.scores import Softmax
from pcomm.inference.model import KVMemory, StepBatch

__all__ = ["Pool", "Tokens", "in_chunks", "random_cuts"]


class Tokens:
    """Queries, keys and values of one request, and how far it is."""

    def __init__(
        self,
        length: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        seed: int,
        head_dim: int = 16,
        value_dim: int | None = None,
    ) -> None:
        widths = (head_dim, head_dim, value_dim or head_dim)
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(length, count, width, generator=generator, dtype=torch.float64).to(dtype)
            for count, width in zip((heads[0], heads[1], heads[1]), widths, strict=True)
        )
        self.done, self.blocks = 0, list[int]()

    def dense(self, dtype: torch.dtype | None = None, scale: float | None = None) -> Tensor:
        """Torch's attention of this request alone, in `dtype`."""
        q, k, v = (x.to(dtype).transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1)


class Pool:
    """Blocks full of NaN, given out in an order of chance."""

    def __init__(
        self,
        heads: tuple[int, int],
        dtype: torch.dtype,
        block_size: int,
        num_tokens: int = 4096,
        seed: int = 0,
        head_dim: int = 16,
        value_dim: int | None = None,
    ) -> None:
        count = num_tokens // block_size + 2
        keys, values = (
            torch.full((count, block_size, heads[1], width), torch.nan, dtype=dtype)
            for width in (head_dim, value_dim or head_dim)
        )
        self.memory, self.block_size = KVMemory(keys, values), block_size
        self.free = list(range(1, count))
        random.Random(seed).shuffle(self.free)

    def batch(self, parts: Sequence[tuple[Tokens, int]]) -> StepBatch:
        """The step in which each request has so many more tokens."""
        size, slots = self.block_size, list[int]()
        cu_seqlens = [0]
        for tokens, new in parts:
            while len(tokens.blocks) * size < tokens.done + new:
                tokens.blocks.append(self.free.pop())
            places = range(tokens.done, tokens.done + new)
            slots += [tokens.blocks[i // size] * size + i % size for i in places]
            cu_seqlens.append(cu_seqlens[-1] + new)
        width = max(len(tokens.blocks) for tokens, _ in parts)
        tables = [tokens.blocks + [0] * (width - len(tokens.blocks)) for tokens, _ in parts]
        contexts = tuple(tokens.done for tokens, _ in parts)
        nothing = torch.zeros(len(slots), dtype=torch.int64)
        return StepBatch(
            tokens_T=nothing,
            positions_T=nothing,
            cu_seqlens=tuple(cu_seqlens),
            cu_seqlens_N1=torch.tensor(cu_seqlens, dtype=torch.int32),
            context_lens=contexts,
            context_lens_N=torch.tensor(contexts, dtype=torch.int32),
            block_tables_NB=torch.tensor(tables, dtype=torch.int32),
            slot_mapping_T=torch.tensor(slots),
            first_blocks=(None,) * len(parts),
            state_slots_N=nothing[: len(parts)],
            logits_rows=nothing[:0],
        )

    def step(self, parts: Sequence[tuple[Tokens, int]], **options: Any) -> list[Tensor]:
        """Rows of each request."""
        batch = self.batch(parts)
        q, k, v = (
            torch.cat([getattr(one, name)[one.done : one.done + new] for one, new in parts])
            for name in "qkv"
        )
        rows = paged_attention(q, k, v, self.memory, batch, **options)
        assert rows.is_contiguous()
        for one, new in parts:
            one.done += new
        return list(rows.split([new for _, new in parts]))

    def decode_by_copies(
        self, requests: Sequence[Tokens], *, window: int | None = None, **options: Any
    ) -> Tensor:
        """What is done with the last tokens on a device without the kernel."""
        batch = self.batch([(one, 1) for one in requests])
        q, k, v = (torch.stack([getattr(one, name)[-1] for one in requests]) for name in "qkv")
        for blocks, new in zip(self.memory.by_token, (k, v), strict=True):
            blocks.index_copy_(0, batch.slot_mapping_T, new)
        places = (batch.block_tables_NB, batch.context_lens_N)
        return decode_by_copies(q, self.memory, *places, Softmax(**options), window)

    def step_on_device(
        self, parts: Sequence[tuple[Tokens, int]], *, window: int | None = None, **options: Any
    ) -> list[Tensor]:
        """Rows of each request, as blocks that are not on the host are read."""
        batch = self.batch(parts)
        q, k, v = (
            torch.cat([getattr(one, name)[one.done : one.done + new] for one, new in parts])
            for name in "qkv"
        )
        rows = attend_on_device(q, k, v, self.memory, batch, Softmax(**options), window)
        assert rows.is_contiguous()
        for one, new in parts:
            one.done += new
        return list(rows.split([new for _, new in parts]))


def in_chunks(tokens: Tokens, pool: Pool, cuts: Sequence[int], **options: Any) -> Tensor:
    """Rows of a request that is alone in each step."""
    return torch.cat([pool.step([(tokens, new)], **options)[0] for new in cuts])


def random_cuts(length: int, chance: random.Random) -> list[int]:
    """Lengths of chunks, many of one token."""
    cuts = list[int]()
    while sum(cuts) < length:
        longest = chance.choice([1, 1, 3, 20, 200, 600])
        cuts.append(min(length - sum(cuts), chance.randint(1, longest)))
    return cuts
