"""Heads that are normed, turned and kept by the kernels that read them, against torch's operations.

Interpreted, for decodes, chunks and both side by side; compiled, and launched into a driver that
checks each argument.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.fake_driver import fake_driver
from core_support.kernel_launches import compiled, resources
from inference_support.kernels import interpreted_kernels
from inference_support.paged_tokens import Pool, Tokens
from pcomm.core.errors import ConfigError
from pcomm.core.testing.assertions import assert_close, assert_equal
from pcomm.inference.attention.on_device import attend_on_device
from pcomm.inference.attention.paged_attention import paged_attention
from pcomm.inference.attention.turn import HeadTurn
from pcomm.inference.layers.norm import Norm
from pcomm.inference.model import KVMemory

pytest.importorskip("triton", reason="triton has wheels for Linux only")

HEADS = (6, 2)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreted_kernels():
        yield


def turn_of(count: int, pairs: int, width: int, dtype: torch.dtype, form: str) -> HeadTurn:
    """The sines lie as a model has them, beside those with the other sign."""
    generator = torch.Generator().manual_seed(count)
    angles = 6 * torch.rand(count, pairs, generator=generator)
    sines = torch.stack([-angles.sin(), angles.sin()], 1).to(dtype)[:, 1]
    norms: list[Norm | None] = [None, None]
    if "norm" in form:
        norms = [
            Norm(torch.randn(width, generator=generator).to(dtype), eps, "centred" in form)
            for eps in (1e-5, 1e-3)
        ]
    return HeadTurn(angles.cos().to(dtype), sines, *norms)


# Whole heads and a part of each, of widths that are no power of two.
CASES = [("", 16, 8), ("norm", 16, 3), ("norm centred", 20, 10), ("norm", 6, 1)]
TURNS = [(*case, dtype) for case, dtype in zip(CASES, (BF16, FP32, BF16, FP32), strict=True)]
OTHERS = [(*case, dtype) for case in CASES for dtype in (FP32, BF16) if (*case, dtype) not in TURNS]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("form", "width", "pairs", "dtype"),
    [*TURNS, *(pytest.param(*one, marks=pytest.mark.soak) for one in OTHERS)],
)
def test_turned_heads_are_those_of_torch(
    form: str, width: int, pairs: int, dtype: torch.dtype
) -> None:
    """Of chunks and decodes, in one tile of keys and in two."""
    parts = ((5, 1), (65, 1), (0, 3), (3, 2), (0, 1))
    found: list[list[Tensor]] = []
    for is_fused in (True, False):
        pool = Pool(HEADS, dtype, 16, head_dim=width)
        requests = [
            Tokens(sum(part), HEADS, dtype, n, head_dim=width) for n, part in enumerate(parts)
        ]
        for one, (done, _) in zip(requests, parts, strict=True):
            if done:
                pool.step([(one, done)])
        new = [(one, count) for one, (_, count) in zip(requests, parts, strict=True)]
        batch = pool.batch(new)
        q, k, v = (
            torch.cat([getattr(one, name)[one.done :] for one in requests]) for name in "qkv"
        )
        before = pool.memory.keys.clone()
        turn = turn_of(len(q), pairs, width, dtype, form)
        if is_fused:
            rows = attend_on_device(q, k, v, pool.memory, batch, turn=turn)
        else:
            rows = attend_on_device(*turn.of(q, k), v, pool.memory, batch)
        keys, values = (one[batch.slot_mapping_T] for one in pool.memory.by_token)
        assert_equal(values, v)
        pool.memory.by_token[0][batch.slot_mapping_T] = before.flatten(0, 1)[batch.slot_mapping_T]
        assert_equal(pool.memory.keys, before)
        found.append([keys, rows])
    (keys, rows), (torch_keys, torch_rows) = found
    # Behind a norm, whose sum has another order, the last bit may be another one.
    if form or dtype == FP32:
        assert_close(keys, torch_keys, num_terms=4, magnitude=float(torch_keys.abs().max()))
    else:
        assert_equal(keys, torch_keys)
    assert_close(rows, torch_rows, num_terms=16, magnitude=float(v.abs().max()))


def apart(x: Tensor, chance: random.Random) -> Tensor:
    """The same numbers, in one of the orders that views have."""
    kind = chance.choice(["side by side", "columns", "every second", "turned", "rows"])
    if kind == "side by side":
        return x
    if kind == "turned":
        return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])
    *rows, width = x.shape
    if kind == "rows":
        wide = x.new_full((2 * rows[0], *rows[1:], width), torch.nan)
        part = wide[::2]
    else:
        wide = x.new_full((*rows, 2 * width + 1), torch.nan)
        part = wide[..., 1::2] if kind == "every second" else wide[..., 1 : 1 + width]
    part.copy_(x)
    return part


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_random_heads_against_fp64(seed: int) -> None:
    """Odd numbers of heads, widths and pairs, no and few tokens, dtypes of memory, any strides."""
    from pcomm.inference.attention.turn_kernel import turn_launch

    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(200 if seed else 8):
        dtype = chance.choice([FP32, BF16, torch.float16])
        count, heads, rows = chance.choice([0, 1, 2, 5]), chance.randint(1, 5), chance.randint(1, 7)
        width, value_width = (chance.choice([1, 3, 6, 8, 13, 16, 33]) for _ in range(2))
        pairs, is_normed = chance.randint(0, width // 2), chance.random() < 0.6

        def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        angles = 6 * drawn(count, pairs, dtype=FP32)
        turned = [apart(x.to(dtype), chance) for x in (angles.cos(), angles.sin())]
        norms = [Norm(drawn(width), 1e-4, chance.random() < 0.5) for _ in range(2 * is_normed)]
        turn = HeadTurn(*turned, *norms)
        q, k = drawn(count, heads * rows, width), drawn(count, heads, width)
        v = drawn(count, heads, value_width)
        kept = chance.choice([dtype, FP32, BF16])
        shape, slots = (4, 4, heads), torch.randperm(16, generator=generator)[:count]
        pools = [torch.full((*shape, one), torch.nan, dtype=kept) for one in (width, value_width)]
        found = torch.full_like(q, torch.nan), torch.full_like(k, torch.nan)
        new = tuple(apart(x, chance) for x in (q, k, v))
        turn_launch(new, KVMemory(*pools), slots, turn, *found).run()

        wide = [Norm(one.weight.double(), one.eps, one.is_zero_centred) for one in norms]
        exact = HeadTurn(*(x.double() for x in turned), *wide).of(q.double(), k.double())
        for ours, wanted in zip(found, exact, strict=True):
            # A norm, its weight, and two products that are rounded, of a pair each.
            allowed = 6 * torch.finfo(dtype).eps * wanted.abs().amax((0, 1, 2)) if count else 0
            assert ((ours.double() - wanted).abs() <= allowed).all()
        keys, values = (pool.flatten(0, 1) for pool in pools)
        assert_equal(keys[slots], found[1].to(kept))
        assert_equal(values[slots], v.to(kept))
        untouched = torch.ones(16, dtype=torch.bool).index_fill(0, slots, value=False)
        assert keys[untouched].isnan().all()
        assert values[untouched].isnan().all()


@pytest.mark.usefixtures("interpreted")
def test_angles_that_lie_apart_in_decodes_and_chunks() -> None:
    one, other = Tokens(4, HEADS, FP32, 0), Tokens(3, HEADS, FP32, 1)
    turn = turn_of(4, 8, 16, FP32, "norm")
    columns = (torch.stack([x, x + 1], 2)[..., 0] for x in (turn.cosines_TR, turn.sines_TR))
    rows = []
    for turned in (turn, HeadTurn(*columns, turn.query_norm, turn.key_norm)):
        pool = Pool(HEADS, FP32, 16)
        one.done, one.blocks, other.done, other.blocks = 0, [], 0, []
        pool.step([(one, 3)])
        batch = pool.batch([(one, 1), (other, 3)])
        q, k, v = (torch.cat([getattr(one, name)[3:], getattr(other, name)]) for name in "qkv")
        rows.append(attend_on_device(q, k, v, pool.memory, batch, turn=turned))
    assert_equal(rows[1], rows[0])


def test_norms_that_kernels_would_misread_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Norm: weight"):
        Norm(torch.ones(8)[::2], 1e-5)
    with pytest.raises(ConfigError, match="one of them alone"):
        HeadTurn(torch.ones(1, 2), torch.ones(1, 2), Norm(torch.ones(4), 1e-5))


@pytest.mark.usefixtures("interpreted")
def test_keys_are_seen_as_they_are_kept() -> None:
    """Where memory has another dtype than the model."""
    one = Tokens(4, HEADS, FP32, 0)
    turn = turn_of(4, 8, 16, FP32, "norm")
    narrow, wide = (Pool(HEADS, dtype, 16) for dtype in (BF16, FP32))
    batch = narrow.batch([(one, 4)])
    q, k = turn.of(one.q, one.k)
    expected = attend_on_device(q, k.to(BF16).float(), one.v.to(BF16).float(), wide.memory, batch)
    found = attend_on_device(one.q, one.k, one.v, narrow.memory, batch, turn=turn)
    assert_close(found, expected, num_terms=8, magnitude=8.0)


@pytest.mark.usefixtures("interpreted")
def test_what_no_kernel_takes_is_turned_by_torch() -> None:
    for dtype, attend in ((torch.float64, attend_on_device), (torch.float64, paged_attention)):
        one, pool = Tokens(9, HEADS, dtype, 0), Pool(HEADS, dtype, 16)
        turn = turn_of(9, 8, 16, dtype, "norm")
        rows: Tensor = attend(one.q, one.k, one.v, pool.memory, pool.batch([(one, 9)]), turn=turn)
        one.q, one.k = turn.of(one.q, one.k)
        assert_close(rows, one.dense(), num_terms=64, magnitude=8.0)


def llama_launches() -> list[Any]:
    """A layer of Llama-8B, with norms: 8 requests that decode, and 8 tokens of a prompt."""
    from pcomm.inference.attention.decode_kernel import decode_launch
    from pcomm.inference.attention.turn_kernel import turn_launch

    heads, key_heads, width, count = 32, 8, 128, 8
    numbers = torch.empty(count, (heads + 2 * key_heads) * width, dtype=BF16)
    sizes = [heads * width, key_heads * width, key_heads * width]
    q, k, v = (part.view(count, -1, width) for part in numbers.split(sizes, 1))
    pool = torch.empty(64, 16, key_heads, width, dtype=BF16)
    memory = KVMemory(pool, pool)
    turn = turn_of(count, 64, width, BF16, "norm centred")
    places = (torch.zeros(count, 64, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))
    decode = decode_launch((q, k, v), memory, places, q.new_empty(q.shape), {}, turn=turn)
    slots = torch.zeros(count, dtype=torch.int64)
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    return [turn_launch((q, k, v), memory, slots, turn, *out), decode]


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.soak)])
def test_registers_suffice(capability: int) -> None:
    for launch in llama_launches():
        found = compiled(launch, capability)
        used = resources(found)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        # Heads are read by 8 bytes for each thread or more.
        assert re.search(r"\bld\.global\.(v[24]\.b(?:32|64))", found.asm["ptx"])


@pytest.mark.parametrize(
    ("dtype", "capability", "forms"),
    [
        (BF16, 90, [("norm", 3)]),
        (FP32, 100, [("", 8)]),
        pytest.param(BF16, 100, [("norm centred", 8)], marks=pytest.mark.soak),
        pytest.param(FP32, 90, [("", 8), ("norm", 3)], marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_they_are_launched_as_they_were_compiled(
    dtype: torch.dtype, capability: int, forms: list[tuple[str, int]]
) -> None:
    found: list[tuple[Any, ...]] = []
    with fake_driver(capability, found):
        for form, pairs in forms:
            pool = Pool(HEADS, dtype, 16)
            requests = [Tokens(6, HEADS, dtype, n) for n in range(3)]
            pool.step([(requests[0], 5)])
            batch = pool.batch([(requests[0], 1), (requests[1], 6), (requests[2], 6)])
            q, k, v = (
                torch.cat([getattr(one, name)[one.done :] for one in requests]) for name in "qkv"
            )
            turn = turn_of(len(q), pairs, 16, dtype, form)
            attend_on_device(q, k, v, pool.memory, batch, turn=turn)
    assert [launch[0] for launch in found] == len(forms) * ["decode_kernel", "turn_kernel"]
