"""Paged attention against each request alone in fp64, over pools that are full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from pcomm.core.errors import ConfigError
from pcomm.core.testing.close import assert_as_accurate, assert_close, assert_equal
from pcomm.inference.attention import planner
from pcomm.inference.attention.decode_on_device import decode_on_device
from pcomm.inference.attention.paged_attention import paged_attention
from pcomm.inference.attention.planner import plan_of, tokens_of_a_call
from pcomm.inference.attention.rounding import MOST_ADDED, rounded_keys
from pcomm.inference.memory import KVMemory
from pcomm.inference.step_batch import StepBatch

# Query heads and key heads.
HEADS = {"no groups": (2, 2), "three share": (6, 2), "eight on one": (8, 1)}
# On both sides of where the number of keys is rounded to another number.
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 192, 193, 384, 385, 449, 512, 513, 580, 710)

has_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="the order of sums in torch's attention is known for AVX-512 BF16 alone",
)


class Tokens:
    """Queries, keys and values of one request, and how far it is."""

    def __init__(self, length: int, heads: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(length, count, 16, generator=generator, dtype=torch.float64).to(dtype)
            for count in (heads[0], heads[1], heads[1])
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
    ) -> None:
        count = num_tokens // block_size + 2
        keys = torch.full((count, block_size, heads[1], 16), torch.nan, dtype=dtype)
        self.memory, self.block_size = KVMemory(keys, keys.clone()), block_size
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
            context_lens=contexts,
            context_lens_N=torch.tensor(contexts, dtype=torch.int32),
            block_tables_NB=torch.tensor(tables, dtype=torch.int32),
            kv_slots_T=torch.tensor(slots),
            first_blocks=(None,) * len(parts),
            state_slots_N=nothing[: len(parts)],
            logits_rows=nothing[:0],
        )

    def step(
        self, parts: Sequence[tuple[Tokens, int]], scale: float | None = None
    ) -> list[Tensor]:
        """Rows of each request."""
        batch = self.batch(parts)
        q, k, v = (
            torch.cat([getattr(one, name)[one.done : one.done + new] for one, new in parts])
            for name in "qkv"
        )
        rows = paged_attention(q, k, v, self.memory, batch, scale=scale)
        for one, new in parts:
            one.done += new
        return list(rows.split([new for _, new in parts]))


def in_chunks(tokens: Tokens, pool: Pool, cuts: Sequence[int]) -> Tensor:
    return torch.cat([pool.step([(tokens, new)])[0] for new in cuts])


def random_cuts(length: int, chance: random.Random) -> list[int]:
    cuts = list[int]()
    while sum(cuts) < length:
        longest = chance.choice([1, 1, 3, 20, 200, 600])
        cuts.append(min(length - sum(cuts), chance.randint(1, longest)))
    return cuts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_each_token_attends_to_its_request_so_far(
    heads: tuple[int, int], block_size: int, dtype: torch.dtype
) -> None:
    pool, chance = Pool(heads, dtype, block_size, 8192), random.Random(block_size)
    requests = [Tokens(length, heads, dtype, seed) for seed, length in enumerate(LENGTHS)]
    found = [list[Tensor]() for _ in requests]
    waiting = [random_cuts(len(one.q), chance) for one in requests]
    while any(waiting):
        chosen = [i for i, cuts in enumerate(waiting) if cuts]
        # Chunks of prompts and single tokens side by side, in any order.
        chance.shuffle(chosen)
        rows = pool.step([(requests[i], waiting[i].pop(0)) for i in chosen])
        for i, own in zip(chosen, rows, strict=True):
            found[i].append(own)
    for one, rows in zip(requests, found, strict=True):
        exact, actual = one.dense(torch.float64), torch.cat(rows)
        if dtype == torch.float64:
            # Scores of 16 products each, softmax and a sum over the keys.
            assert_close(actual, exact, num_terms=2 * 16 + len(one.q), magnitude=16.0)
        else:
            assert_as_accurate(actual, one.dense(), exact, num_terms=8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    heads = HEADS["three share"]
    lengths = (*LENGTHS, 70, 71, 72, 73)

    def rows(chosen: Sequence[int], news: Sequence[int]) -> list[Tensor]:
        pool, found = Pool(heads, dtype, 16, 8192), list[Tensor]()
        requests = [Tokens(lengths[i], heads, dtype, i) for i in chosen]
        for one, new in zip(requests, news, strict=True):
            if len(one.q) > new:
                pool.step([(one, len(one.q) - new)])
        found = pool.step(list(zip(requests, news, strict=True)))
        return found

    for news in ([1] * len(lengths), [1 + i % 3 * (length > 3) for i, length in enumerate(lengths)]):
        together = rows(range(len(lengths)), news)
        for i, (own, new) in enumerate(zip(together, news, strict=True)):
            assert_equal(own, rows([i], [new])[0])


@has_bf16
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_bits_do_not_depend_on_chunks_or_blocks(heads: tuple[int, int], block_size: int) -> None:
    for seed, length in enumerate((20, 390, 710)):
        whole = in_chunks(Tokens(length, heads, torch.bfloat16, seed), Pool(heads, torch.bfloat16, 16), [length])
        for cuts in ([1] * length, random_cuts(length, random.Random(seed))):
            tokens = Tokens(length, heads, torch.bfloat16, seed)
            pool = Pool(heads, torch.bfloat16, block_size, seed=seed)
            assert_equal(in_chunks(tokens, pool, cuts), whole)
