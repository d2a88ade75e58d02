"""Messages against a slow reference that copies column by column, by torch and by the kernels.

The kernels run under Triton's interpreter on the CPU: the same source, tile by tile. Values are
whole numbers, whose sums are exact in every dtype here, so everything is compared bit by bit.
"""

# t tokens of a rank, T of all, R ranks, W columns of a rank in all sections, C of a section

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.interpreter import interpreted
from pcomm.core.exchange import ColumnShards, Packing
from pcomm.core.testing.assertions import assert_close, assert_equal, poisoned_memory
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, HeadShare, Mamba2Spec, Spec, make_plan
from pcomm.gdn_cp.ops.backend import PackingChoice
from pcomm.gdn_cp.strategies import strategy
from pcomm.gdn_cp.strategies.head_share import SectionShare

KERNELS = "pcomm.gdn_cp.triton_packing"
# Copies on other ranks, copies on the same rank, none; heads as wide as a tile and odd ones.
SPECS = [
    pytest.param(GdnSpec(2, 8, 6, 3), 4, id="gdn, 2 copies"),
    pytest.param(GdnSpec(3, 6, 4, 5), 2, id="gdn, copies on both sides of a boundary"),
    pytest.param(Mamba2Spec(8, 2, 1, 7), 8, id="mamba, 8 copies"),
    pytest.param(AttentionSpec(6, 6, 37), 3, id="attention, odd widths"),
    pytest.param(AttentionSpec(4, 2, 130), 2, id="attention, several tiles wide"),
    pytest.param(AttentionSpec(4, 2, 8), 1, id="one rank"),
]


@pytest.fixture(scope="module")
def interpreted_here() -> Iterator[None]:
    with interpreted([KERNELS]):
        yield


@pytest.fixture(params=["torch", "triton"])
def packing(request: pytest.FixtureRequest) -> Iterator[Packing]:
    if request.param == "triton":
        request.getfixturevalue("interpreted_here")
    with poisoned_memory():
        yield PackingChoice(request.param, "for the test").packing


def numbered(rows: int, columns: int, dtype: torch.dtype, strides: str = "contiguous") -> Tensor:
    """Small whole numbers; neighbours differ along both dimensions."""
    x = (torch.arange(rows * columns) * 7 % 101 - 50).view(rows, columns).to(dtype)
    if strides == "columns first":
        return x.t().contiguous().t()
    if strides == "of a projection":
        # A stretch of columns of something wider, which starts at an odd place.
        return torch.cat([x[:, :3], x, x[:, :2]], 1)[:, 3 : 3 + columns]
    if strides == "every other":
        return x.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
    return x[:1].expand(rows, columns) if strides == "one row" else x


def columns_of(share: SectionShare, rank: int) -> list[int]:
    width = share.section.head_width
    return [head * width + i for head in share.heads(rank) for i in range(width)]


def shards_of(shares: tuple[SectionShare, ...]) -> list[ColumnShards]:
    return [share.columns for share in shares]


def slow_pack(sections: list[Tensor], shares: tuple[SectionShare, ...], size: int) -> Tensor:
    pairs = list(zip(sections, shares, strict=True))
    return torch.cat(
        [torch.cat([x[:, columns_of(s, rank)] for x, s in pairs], 1) for rank in range(size)]
    )


def slow_unpack(message: Tensor, shares: tuple[SectionShare, ...], size: int) -> list[Tensor]:
    messages, offset, found = message.double().unflatten(0, (size, -1)), 0, []
    for share in shares:
        section = messages.new_zeros(messages.shape[1], share.section.width)
        for rank in range(size):
            for place, column in enumerate(columns_of(share, rank)):
                section[:, column] += messages[rank, :, offset + place]
        found.append(section.to(message.dtype))
        offset += share.width
    return found


def slow_rows(parts: list[Tensor], order: Tensor | None) -> Tensor:
    rows = range(len(parts[0])) if order is None else order.tolist()
    whole = torch.cat([part.contiguous() for part in parts], 1)
    return torch.stack([whole[row] for row in rows]) if rows else whole


@pytest.mark.parametrize(
    ("spec", "size", "rows"),
    # Rows of more than one tile; of one, and of none.
    [pytest.param(*one.values, 70, id=str(one.id)) for one in SPECS]
    + [pytest.param(*SPECS[0].values, rows, id=f"{rows} rows") for rows in (0, 1)],
)
def test_sections_become_a_message_and_a_message_sections(
    packing: Packing, spec: Spec, size: int, rows: int
) -> None:
    shares = HeadShare(spec, size, 0).sections
    sections = [numbered(rows, share.section.width, torch.float32) + n for n, share in
                enumerate(shares)]  # fmt: skip
    message = packing.pack_sections(sections, shards_of(shares))
    assert_equal(message, slow_pack(sections, shares, size))
    arrived = numbered(size * rows, message.shape[1], torch.float32)
    found = packing.unpack_sections(arrived, shards_of(shares))
    for mine, expected in zip(found, slow_unpack(arrived, shares, size) if rows else found,
                              strict=True):  # fmt: skip
        assert_equal(mine, expected)


@pytest.mark.parametrize(
    ("rows", "widths", "permuted"),
    [
        (70, (5, 130, 8), True),
        (70, (193, 1, 2), False),
        (70, (64, 64), True),
        (70, (1,), True),
        (1, (64, 64), False),
        (0, (5, 130, 8), True),
        (0, (5, 130, 8), False),
    ],
    ids=str,
)
def test_rows_are_taken_in_an_order(
    packing: Packing, rows: int, widths: tuple[int, ...], permuted: bool
) -> None:
    parts = [numbered(rows, width, torch.float32) + n for n, width in enumerate(widths)]
    generator = torch.Generator().manual_seed(rows)
    order = torch.randperm(rows, generator=generator) if permuted else None
    assert_equal(packing.take_rows(parts, order), slow_rows(parts, order))


@pytest.mark.parametrize("strides", ["columns first", "of a projection", "every other", "one row"])
def test_any_strides(packing: Packing, strides: str) -> None:
    shares, size = HeadShare(GdnSpec(2, 8, 6, 3), 4, 0).sections, 4
    sections = [numbered(33, share.section.width, torch.float32, strides) for share in shares]
    expected = slow_pack(sections, shares, size)
    assert_equal(packing.pack_sections(sections, shards_of(shares)), expected)
    order = torch.arange(33).flip(0)
    assert_equal(packing.take_rows(sections, order), slow_rows(sections, order))
    message = numbered(32, expected.shape[1], torch.float32, strides)
    found = packing.unpack_sections(message, shards_of(shares))
    for mine, expected in zip(found, slow_unpack(message, shares, size), strict=True):
        assert_equal(mine, expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float64, torch.int16, torch.int64],
    ids=str,
)
def test_any_dtype(packing: Packing, dtype: torch.dtype) -> None:
    # Torch adds integers in 64 bits, and gradients are no integers: these only move.
    key_heads = 2 if dtype.is_floating_point else 8
    shares, size = HeadShare(GdnSpec(key_heads, 8, 6, 3), 4, 0).sections, 4
    sections = [numbered(9, share.section.width, dtype) for share in shares]
    message = packing.pack_sections(sections, shards_of(shares))
    assert_equal(message, slow_pack(sections, shares, size))
    found = packing.unpack_sections(message, shards_of(shares))
    for mine, expected in zip(found, slow_unpack(message, shares, size), strict=True):
        assert_equal(mine, expected)
    order = torch.arange(36).roll(5)
    assert_equal(packing.take_rows([message], order), slow_rows([message], order))


def test_copies_are_added_in_fp32_and_rounded_once(packing: Packing) -> None:
    shares, size = HeadShare(Mamba2Spec(8, 2, 1, 4), 8, 0).sections, 8
    width = sum(share.width for share in shares)
    message = torch.randn(8 * 5, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    # 1 + 6 / 256 is a number of bf16; added in bf16, each of the six would be lost.
    message[:, shares[0].width] = torch.tensor([1.0] + [1 / 256] * 6 + [0]).repeat_interleave(5)
    found = packing.unpack_sections(message, shards_of(shares))
    # The interpreter cuts off where a GPU rounds, so an element is off by up to two roundings.
    for mine, expected in zip(found, slow_unpack(message.double(), shares, size), strict=True):
        assert_close(mine, expected, num_terms=1, magnitude=float(expected.abs().max()))
    assert_equal(found[1][:, 0], torch.full((5,), 1 + 6 / 256).bfloat16())


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(GdnSpec(1, 4, 2, 3), "zigzag"), (AttentionSpec(4, 4, 5), "contiguous")],
    ids=str,
)
@pytest.mark.usefixtures("interpreted_here")
def test_a_plan_moves_the_same_by_kernels_as_by_torch(
    monkeypatch: pytest.MonkeyPatch, spec: Spec, layout: Any
) -> None:
    cu_seqlens = (0, 16, 16, 64, 80)
    launch, one_at_a_time, found = sys.modules[KERNELS].TileLaunch, threading.Lock(), {}
    right = launch.run

    def run(self: Any) -> None:
        # Virtual ranks are threads, and the interpreter has one grid for the whole process.
        with one_at_a_time:
            right(self)

    monkeypatch.setattr(launch, "run", run)
    for name in ("torch", "triton"):
        monkeypatch.setattr(
            strategy, "choose_packing", lambda *_, name=name: PackingChoice(name, "test")
        )

        def on_rank(collectives: VirtualCollectives) -> list[Tensor]:
            plan = make_plan(cu_seqlens, collectives, spec, layout=layout, strategy="heads")
            mine = [
                plan.shard(numbered(80, s.width, torch.float64)).requires_grad_()
                for s in spec.sections
            ]
            there = plan.to_heads(spec, mine, fused=2)
            # Of another shape than their parts have in memory, as a convolution returns them.
            upstream = [x.detach().t().contiguous().t() * 3 for x in there]
            grads = torch.autograd.grad(there, mine, upstream)
            width = plan.head_share(spec).output.width
            output = numbered(80, width, torch.float64).requires_grad_()
            back = plan.from_heads(spec, output)
            (grad,) = torch.autograd.grad(back, output, back.detach() * 2)
            return [*(x.detach() for x in there), *grads, back.detach(), grad]

        found[name] = run_virtual(on_rank, 2)
    for by_torch, by_triton in zip(found["torch"], found["triton"], strict=True):
        for expected, mine in zip(by_torch, by_triton, strict=True):
            assert_equal(mine, expected)


@pytest.mark.usefixtures("interpreted_here")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("order", lambda x: x.argsort()),
        ("num_rows", lambda n: n - 1),
        ("column_strides", lambda s: (1,) * len(s)),
        ("SHAPES", lambda shapes: tuple((*s[:2], 1, *s[3:]) for s in shapes)),
    ],
    ids=["order inverted", "last row", "strides", "copies"],
)
def test_a_launch_that_is_told_something_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]
) -> None:
    shares = HeadShare(GdnSpec(2, 8, 6, 3), 4, 0).sections
    # Stretches of something wider, so that a break reads other numbers and not past the end.
    wide = [numbered(9, 4 * s.section.width, torch.float32, "columns first") for s in shares]
    sections = [x[:, : s.section.width] for x, s in zip(wide, shares, strict=True)]
    order = torch.randperm(36, generator=torch.Generator().manual_seed(1))
    arrived = numbered(36, sum(share.width for share in shares), torch.float32)
    launch = sys.modules[KERNELS].TileLaunch
    right = launch.run

    def broken(self: Any) -> None:
        if name in self.arguments:
            self.arguments[name] = change(self.arguments[name])
        right(self)

    monkeypatch.setattr(launch, "run", broken)
    by_kernels, by_torch = (
        [
            packing.pack_sections(sections, shards_of(shares)),
            packing.take_rows([arrived[:, :7], arrived[:, 7:]], order),
            *packing.unpack_sections(arrived, shards_of(shares)),
        ]
        for packing in (PackingChoice(one, "test").packing for one in ("triton", "torch"))
    )
    pairs = zip(by_kernels, by_torch, strict=True)
    assert not all(torch.equal(mine, expected) for mine, expected in pairs)
