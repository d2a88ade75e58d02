"""Decodes in one launch and chunks in one call: interpreted against dense attention, and compiled.

Lengths lie on both sides of a step of the kernel's loop (64 keys), of a split (256), and of the
number of keys from which splits grow.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.fake_driver import fake_driver
from core_support.kernel_launches import compiled
from inference_support.kernels import interpreted_kernels
from inference_support.paged_tokens import Pool, Tokens
from inference_support.score_cases import CASES, G, H, assert_right, made
from pcomm.core.testing.assertions import assert_equal
from pcomm.inference.attention.on_device import attend_on_device
from pcomm.inference.attention.scores import Softmax
from pcomm.inference.model import KVMemory

pytest.importorskip("triton", reason="triton has wheels for Linux only")

LENGTHS = (2, 65, 256, 257)


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    with interpreted_kernels() as modules:
        yield modules["attention.decode_kernel"]


def leave_garbage(pool: Pool, one: Tokens) -> None:
    """Behind the last token of a block, where nothing clears it."""
    offsets = torch.arange(pool.block_size)
    slots = (torch.tensor(one.blocks)[:, None] * pool.block_size + offsets).flatten()
    for blocks in pool.memory.by_token:
        blocks[slots[one.done :]] = torch.nan


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("window 1", torch.bfloat16), ("narrow values", torch.float32), ("all", torch.float32)],
    ids=str,
)
def test_decodes_get_what_the_formula_says(
    interpreted: ModuleType, case: str, dtype: torch.dtype
) -> None:
    block_size = 16 if dtype == torch.float32 else 1
    pool, requests, options = made(CASES[case], dtype, block_size, LENGTHS)
    for one in requests:
        pool.step([(one, len(one.q) - 1)], **options)
        leave_garbage(pool, one)
    before = pool.memory.keys.clone()
    found = pool.step_on_device([(one, 1) for one in requests], **options)
    for one, row in zip(requests, found, strict=True):
        assert_right(row, one, options)
        last = len(one.q) - 1
        place = one.blocks[last // block_size], last % block_size
        assert_equal(pool.memory.keys[place], one.k[-1])
        assert_equal(pool.memory.values[place], one.v[-1])
        before[place] = one.k[-1]
    assert_equal(pool.memory.keys, before)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the width of the tables, the places of blocks, or which split comes last."""
    monkeypatch.setattr(interpreted, "_MOST_SPLITS", 2)
    lengths = (256, 600)
    pool, requests, _ = made({}, torch.float32, 16, lengths)
    for one in requests:
        pool.step([(one, len(one.q) - 1)])
    together = pool.step_on_device([(one, 1) for one in requests])
    for seed, (one, row) in enumerate(zip(requests, together, strict=True)):
        alone = Pool((H, G), torch.float32, 64, seed=seed)
        again = Tokens(len(one.q), (H, G), torch.float32, seed)
        alone.step([(again, len(one.q) - 1)])
        assert_equal(alone.step_on_device([(again, 1)])[0], row)


@pytest.mark.usefixtures("interpreted")
def test_layers_of_a_step_share_what_splits_leave() -> None:
    pool, (one,), _ = made({}, torch.float32, 16, (257,))
    pool.step([(one, 256)])
    batch, other_step = (pool.batch([(one, 1)]) for _ in range(2))
    new = one.k[256:], one.v[256:], pool.memory
    assert_right(attend_on_device(one.q[256:], *new, batch), one, {})
    # Else the first split to arrive in the next layer would take itself for the last.
    ((_, _, arrivals),) = batch.prepared.values()
    assert not arrivals.any()
    second = attend_on_device(-one.q[256:], *new, batch)
    assert_equal(second, attend_on_device(-one.q[256:], *new, other_step))


@pytest.mark.parametrize("case", ["window 17", "sinks", "slopes", "wide values", "all"])
def test_chunks_and_decodes_side_by_side(interpreted: ModuleType, case: str) -> None:
    """Prompts in chunks, some of one token, and decodes before them, as the engine sends them."""
    lengths = (17, 100)
    pool, requests, options = made(CASES[case], torch.float32, 16, lengths)
    chance, found = random.Random(len(case)), [list[Tensor]() for _ in lengths]
    waiting = [[min(chance.choice([1, 30, 200]), n), 0] for n in lengths]
    for cuts, n in zip(waiting, lengths, strict=True):
        cuts[1:] = [1] * min(2, n - cuts[0])
        if rest := n - sum(cuts):
            cuts.insert(1, rest)
    while any(waiting):
        # Decodes first.
        chosen = sorted(
            (i for i, cuts in enumerate(waiting) if cuts),
            key=lambda i: not (waiting[i][0] == 1 and requests[i].done),
        )
        rows = pool.step_on_device([(requests[i], waiting[i].pop(0)) for i in chosen], **options)
        for i, own in zip(chosen, rows, strict=True):
            found[i].append(own)
    for one, own_rows in zip(requests, found, strict=True):
        assert_right(torch.cat(own_rows), one, options)


def test_what_the_kernel_does_not_take_is_copied(interpreted: ModuleType) -> None:
    for dtype, width, is_taken in (
        (torch.float32, 256, True),
        (torch.float32, 257, False),
        (torch.float64, 16, False),
    ):
        pool = Pool((H, G), dtype, 16, 64, head_dim=width)
        one = Tokens(5, (H, G), dtype, 0, width)
        assert interpreted.takes(one.q, pool.memory) == is_taken
        assert_right(torch.cat([pool.step_on_device([(one, n)])[0] for n in (4, 1)]), one, {})


def test_queries_of_a_key_head_fit_in_shared_memory(interpreted: ModuleType) -> None:
    """128 rows of 256 numbers in fp32 need 295,680 bytes, and Hopper has 232,448."""
    for dtype, heads, is_taken in (
        (torch.float32, 64, True),
        (torch.float32, 65, False),
        (torch.bfloat16, 128, True),
        (torch.bfloat16, 129, False),
    ):
        memory = KVMemory(*torch.empty(2, 1, 16, 1, 256, dtype=dtype))
        assert interpreted.takes(torch.empty(1, heads, 256, dtype=dtype), memory) == is_taken


def test_long_prompts_of_changed_scores_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from pcomm.inference.attention import on_device

    monkeypatch.setattr(on_device, "_SCORE_BYTES", 4 * H * 300 * 7)
    pool, (one,), options = made(CASES["all"], torch.float32, 16, (300,))
    rows = pool.step_on_device([(one, 100)], **options) + pool.step_on_device(
        [(one, 200)], **options
    )
    assert_right(torch.cat(rows), one, options)


# -- as it is compiled -----------------------------------------------------------------------


def llama_launch(softmax: Softmax, window: int | None) -> Any:
    """A Llama-8B layer of 8 requests in bf16."""
    from pcomm.inference.attention.decode_kernel import decode_launch

    heads, key_heads, width, count = 32, 8, 128, 8
    numbers = torch.empty(count, (heads + 2 * key_heads) * width, dtype=torch.bfloat16)
    parts = numbers.split([heads * width, key_heads * width, key_heads * width], 1)
    q, k, v = (part.view(count, -1, width) for part in parts)
    pool = torch.empty(64, 16, key_heads, width, dtype=torch.bfloat16)
    places = (torch.zeros(count, 64, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))
    out = q.new_empty(q.shape)
    return decode_launch((q, k, v), KVMemory(pool, pool), places, out, {}, softmax, window)


def long_form(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("scores", "capability"),
    [("plain", 90), ("changed", 100), long_form("plain", 100), long_form("changed", 90)],
)
def test_loads_are_wide_and_in_flight_before_they_are_used(scores: str, capability: int) -> None:
    changed = Softmax(0.1, 30.0, torch.empty(32), torch.empty(32)), 1024
    launch = llama_launch(*(changed if scores == "changed" else (Softmax(), None)))
    found = compiled(launch, capability)
    ptx = found.asm["ptx"]
    # Keys and values by 16 bytes for each thread, asynchronously.
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx)
    assert copies
    assert {int(size, 16) for size in copies} <= {4, 16}
    assert copies.count("10") >= 16
    assert re.search(r"\bmma\.sync|\bwgmma|\btcgen05", ptx)
    assert re.search(r"atom\.(global\.)?(gpu\.)?acq_rel|atom\.\S*acq_rel", ptx)
    # No division of integers of 64 bits, which is a subroutine.
    assert "div.s64" not in ptx
    assert found.metadata.shared <= 96 << 10


@pytest.mark.parametrize(
    ("case", "dtype", "capability"),
    [
        ("all", torch.bfloat16, 90),
        ("widest", torch.bfloat16, 100),
        long_form("all", torch.float32, 100),
        long_form("widest", torch.float32, 90),
    ],
    ids=str,
)
def test_decodes_are_launched_as_they_were_compiled(
    case: str, dtype: torch.dtype, capability: int
) -> None:
    """The driver refuses an argument, a grid or a need of memory that no launch may have."""
    found: list[tuple[Any, ...]] = []
    with fake_driver(capability, found):
        pool, requests, options = made(CASES.get(case, {}), dtype, 16, LENGTHS)
        if case == "widest":
            pool = Pool((H, G), dtype, 16, 1024, head_dim=256)
            requests = [Tokens(length, (H, G), dtype, length, 256) for length in LENGTHS]
        for one in requests:
            pool.step([(one, len(one.q) - 1)], **options)
        pool.step_on_device([(one, 1) for one in requests], **options)
        # Other numbers of requests, and narrower tables, of which the widest have no other needs.
        others = [] if case == "widest" else requests
        for one in others:
            one.done -= 1
            pool.step_on_device([(one, 1)], **options)
    assert [launch[0] for launch in found] == (1 + len(others)) * ["decode_kernel"]
