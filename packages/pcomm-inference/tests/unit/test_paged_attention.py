"""Paged attention against each request alone in fp64, over pools that are full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from inference_support.paged_tokens import Pool, Tokens, in_chunks, random_cuts
from pcomm.core.errors import ConfigError
from pcomm.core.testing.assertions import assert_as_accurate, assert_close, assert_equal
from pcomm.inference.attention import plan as planner
from pcomm.inference.attention.on_device import decode_by_copies
from pcomm.inference.attention.plan import MOST_ADDED, plan_of, rounded_keys, tokens_of_a_call
from pcomm.inference.model import KVMemory, StepBatch

# Query heads and key heads.
HEADS = {"no groups": (2, 2), "three share": (6, 2), "eight on one": (8, 1)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# On both sides of where the number of keys is rounded to another number.
LENGTHS = (1, 2, 64, 65, 192, 193, 384, 385, 512, 513, 710)

has_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="the order of sums in torch's attention is known for AVX-512 BF16 alone",
)


# Each two values of heads, blocks and dtype once.
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        (heads, block_size, DTYPES[(i + j) % 3])
        for i, heads in enumerate(HEADS.values())
        for j, block_size in enumerate((1, 16, 256))
    ],
)
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


@pytest.mark.instructions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    heads = HEADS["three share"]
    lengths = (*LENGTHS, 60, 61, 62, 63)

    def rows(chosen: Sequence[int], news: Sequence[int]) -> list[Tensor]:
        pool = Pool(heads, dtype, 16, 4096)
        requests = [Tokens(lengths[i], heads, dtype, i) for i in chosen]
        for one, new in zip(requests, news, strict=True):
            if len(one.q) > new:
                pool.step([(one, len(one.q) - new)])
        return pool.step(list(zip(requests, news, strict=True)))

    # Every third has a chunk in the second round.
    for news in ([1] * len(lengths), [1 + i % 3 % length for i, length in enumerate(lengths)]):
        for i, own in enumerate(rows(range(len(lengths)), news)):
            assert_equal(own, rows([i], [news[i]])[0])


@has_bf16
@pytest.mark.parametrize("block_size", [1, 256])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_bits_do_not_depend_on_chunks_or_blocks(heads: tuple[int, int], block_size: int) -> None:
    dtype, head_dim = torch.bfloat16, 64

    def rows(length: int, cuts: Sequence[int], block_size: int) -> Tensor:
        tokens = Tokens(length, heads, dtype, length, head_dim)
        pool = Pool(heads, dtype, block_size, 1024, length, head_dim)
        return in_chunks(tokens, pool, cuts)

    for length, num_alone in ((210, 210), (710, 20)):
        whole = rows(length, [length], 16)
        chunk, rest = [length - num_alone] * (num_alone < length), divmod(length, 33)
        for cuts in (
            [*chunk, *[1] * num_alone],
            random_cuts(length, random.Random(length)),
            # One row, or three, are left behind a multiple of 32.
            [*[33] * rest[0], rest[1]],
        ):
            assert_equal(rows(length, cuts, block_size), whole)


def test_neither_other_requests_nor_block_0_are_read_or_written() -> None:
    heads, pool = HEADS["three share"], Pool(HEADS["three share"], torch.float32, 16)
    sound, broken = (Tokens(40, heads, torch.float32, seed) for seed in (0, 1))
    broken.k[3], broken.v[5] = torch.nan, torch.inf
    for new in (37, 1, 2):
        rows, others = pool.step([(sound, new), (broken, new)])
        assert torch.isfinite(rows).all()
        assert not torch.isfinite(others[-1]).all()
    keys, values = pool.memory.keys, pool.memory.values
    own = torch.tensor(sound.blocks + broken.blocks)
    untouched = torch.ones(len(keys), dtype=torch.bool).index_fill(0, own, False)
    assert untouched[0]
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()
    assert_equal(keys[sound.blocks].flatten(0, 1)[:40], sound.k)
    assert_equal(values[sound.blocks].flatten(0, 1)[:40], sound.v)
    assert (keys[sound.blocks].flatten(0, 1)[40:] == 0).all()


@pytest.mark.parametrize("block_size", [1, 16])
def test_decoding_with_tensors_of_the_device_alone(block_size: int) -> None:
    heads = HEADS["three share"]
    pool = Pool(heads, torch.float64, block_size)
    requests = [Tokens(length, heads, torch.float64, length) for length in (2, 17, 33, 100)]
    for one in requests:
        pool.step([(one, len(one.q) - 1)])
        # The rest of a block is not zero where nothing clears it.
        blocks = pool.memory.keys[one.blocks].flatten(0, 1)
        pool.memory.keys[one.blocks] = blocks.index_fill(
            0, torch.arange(one.done, len(blocks)), torch.nan
        ).view(-1, *pool.memory.keys.shape[1:])
    found = pool.decode_by_copies(requests)
    assert found.is_contiguous()
    for one, row in zip(requests, found, strict=True):
        exact = one.dense(torch.float64)[-1]
        assert_close(row, exact, num_terms=2 * 16 + len(one.q), magnitude=16.0)


def test_decoding_on_a_device_asks_for_no_number_of_a_tensor() -> None:
    """So that a graph can be captured: a tensor without numbers raises when one is asked for."""
    heads = HEADS["three share"]
    pool = Pool(heads, torch.float32, 16)
    requests = [Tokens(length, heads, torch.float32, length) for length in (2, 40)]
    for one in requests:
        pool.step([(one, len(one.q) - 1)])
    batch = pool.batch([(one, 1) for one in requests])
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        without = StepBatch(
            **{
                name: mode.from_tensor(value) if isinstance(value, Tensor) else value
                for name, value in vars(batch).items()
            }
        )
        memory = KVMemory(*map(mode.from_tensor, (pool.memory.keys, pool.memory.values)))
        rows = decode_by_copies(
            torch.empty(2, 6, 16), memory, without.block_tables_NB, without.context_lens_N
        )
    assert rows.shape == (2, 6, 16)


def test_requests_share_a_call_up_to_half_a_mebibyte_of_keys_and_values() -> None:
    # 64 keys of 2 heads of 16, and as many values, in fp64.
    assert planner._CALL_BYTES == 16 * 64 * 2 * 2 * 16 * 8
    pool = Pool(HEADS["no groups"], torch.float64, 16)
    requests = [Tokens(30, HEADS["no groups"], torch.float64, seed) for seed in range(17)]
    for one in requests:
        pool.step([(one, 20)])

    def calls(count: int) -> list[int]:
        batch = pool.batch([(one, 1) for one in requests[:count]])
        plan = plan_of(batch, pool.memory, requests[0].q)
        assert plan_of(batch, pool.memory, requests[0].q) is plan
        return [call.indices.num_requests for call in plan.decode_calls]

    assert calls(16) == [16]
    assert calls(17) == [16, 1]


def test_a_chunk_is_served_256_rows_at_a_time() -> None:
    assert [tokens_of_a_call(rows) for rows in (1, 3, 256, 300)] == [256, 85, 1, 1]
    heads = HEADS["eight on one"]
    for length in (32, 33):
        tokens = Tokens(length, heads, torch.float64, 0)
        rows = in_chunks(tokens, Pool(heads, torch.float64, 16), [length])
        exact = tokens.dense(torch.float64)
        assert_close(rows, exact, num_terms=2 * 16 + length, magnitude=16.0)


def test_few_keys_are_added_to_round_their_number() -> None:
    found = [rounded_keys(count) for count in range(1, 2000)]
    added = [rounded - count for count, rounded in enumerate(found, start=1)]
    assert min(added) == 0
    assert max(added) == MOST_ADDED == 191
    assert found == sorted(found)
    # A request that is longer has the same parts before its last one.
    assert [rounded_keys(512 + count) for count in range(1, 513)] == [
        512 + rounded_keys(count) for count in range(1, 513)
    ]


def test_a_long_prompt_needs_memory_for_its_keys_and_not_for_its_square() -> None:
    length, heads = 6000, (9, 3)
    tokens, pool = Tokens(length, heads, torch.bfloat16, 0), Pool(heads, torch.bfloat16, 16, 6016)
    pool.step([(tokens, 3000)])
    plan = plan_of(pool.batch([(tokens, 3000)]), pool.memory, tokens.q)
    assert plan.causal_mask is not None
    # 256 rows, and 4 tokens that fill a call, of 6,000 keys and those that round them.
    assert plan.causal_mask.mask.numel() <= (256 + 3 * 4) * (length + 300)
    (rows,) = pool.step([(tokens, 3000)])
    chosen = torch.tensor([0, 1, 84, 85, 511, 512, 1234, 2999])
    k, v = (x.double().transpose(0, 1)[None] for x in (tokens.k, tokens.v))
    q_1HMK = tokens.q[3000 + chosen].double().transpose(0, 1)[None]
    is_seen = torch.arange(length) <= 3000 + chosen.unsqueeze(1)
    exact = F.scaled_dot_product_attention(q_1HMK, k, v, is_seen, enable_gqa=True)
    # Weights are rounded to bf16 once, and so is the result; sums are in fp32.
    assert_close(
        rows[chosen].double().to(torch.bfloat16),
        exact[0].transpose(0, 1),
        num_terms=1,
        magnitude=float(v.abs().mean()),
    )


def test_a_scale_and_blocks_of_another_dtype() -> None:
    heads = HEADS["three share"]
    tokens, pool = Tokens(70, heads, torch.float32, 0), Pool(heads, torch.bfloat16, 16)
    rows = torch.cat([pool.step([(tokens, new)], scale=0.5)[0] for new in (60, 1, 9)])
    assert rows.dtype == torch.float32
    tokens.k, tokens.v = (x.bfloat16().float() for x in (tokens.k, tokens.v))
    exact = tokens.dense(torch.float64, scale=0.5)
    assert_as_accurate(rows, tokens.dense(torch.float32, scale=0.5), exact, num_terms=8)


@pytest.mark.parametrize(
    ("name", "part"),
    [("k", slice(1)), ("q", (..., slice(8))), ("q", (slice(None), slice(5)))],
    ids=["heads", "width", "queries"],
)
def test_shapes_that_do_not_fit_are_refused(name: str, part: Any) -> None:
    pool, tokens = Pool((6, 2), torch.float32, 16), Tokens(4, (6, 2), torch.float32, 0)
    whole = getattr(tokens, name)
    setattr(tokens, name, whole[:, part] if name == "k" else whole[part])
    with pytest.raises(ConfigError, match="blocks of 16 tokens with 2 heads of 16"):
        pool.step([(tokens, 4)])
