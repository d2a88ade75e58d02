"""Variable counts and the gather to one rank under emulation, in random order.

Every rank makes what all ranks pass from one seed, and compares with slices and sums of that.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from nvls_support.emulation import opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.errors import ConfigError, LayoutError, TopologyError, UnsupportedError
from pcomm.core.testing import ranks

SUMMED = [torch.bfloat16, torch.float16, torch.float32]
# Blocks move 128 vectors of 16 bytes at a time, and 2 or 4 of them do it in turn.
WIDTHS = [1, 3, 43, 128, 129, 300]
LEFT = 99


def as_passed(case: random.Random, x: Tensor) -> Tensor:
    """The tensor dense, with other strides, or at an address that is no multiple of 16."""
    way = case.randrange(4)
    if way == 0:
        return x.t().contiguous().t()
    if way == 1:
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    return x.clone()


class Case:
    """One random call, equal on all ranks, and its check on this one."""

    def __init__(self, case: random.Random, workspace: Any, rank: int) -> None:
        self.random, self.rank, self.workspace = case, rank, workspace
        self.size: int = workspace.group.size
        self.named = {"workspace": workspace, "algo": case.choice(["multimem", "p2p", "dist"])}
        self.dtype = case.choice(SUMMED)
        self.columns = case.choice(WIDTHS) * 16 // self.dtype.itemsize
        self.most = case.randrange(1, 6)
        # None, some and all, for each rank apart from the others.
        self.counts = [self.count() for _ in range(self.size)]

    def count(self) -> int:
        return self.random.choice([0, self.most, self.random.randrange(self.most + 1)])

    def integers(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randint(-9, 10, shape, generator=generator).to(self.dtype)

    def of_ranks(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.counts)

    def left(self, *shape: int) -> Tensor:
        return as_passed(self.random, torch.full(shape, LEFT, dtype=self.dtype))

    def on_device(self) -> Tensor:
        return torch.tensor(self.counts, dtype=torch.int32)

    def all_gather_v(self) -> None:

        whole = self.integers(sum(self.counts), self.columns)
        own = self.of_ranks(whole)[self.rank]
        if self.random.random() < 0.3:
            found = nvls.all_gather_v(as_passed(self.random, own), self.counts, **self.named)
            assert torch.equal(found, whole)
            return
        # Rows that do not count are sent nowhere.
        x = torch.cat([own, own.new_full((self.most - len(own), self.columns), -LEFT)])
        rows = self.random.choice([self.size * self.most, max(1, sum(self.counts) - 1), 40])
        out = self.left(rows, self.columns)
        found = nvls.all_gather_v(
            as_passed(self.random, x), self.on_device(), out=out, **self.named
        )
        assert found is out
        there = min(rows, len(whole))
        assert torch.equal(found[:there], whole[:there])
        assert (found[there:] == LEFT).all()

    def reduce_scatter_v(self) -> None:

        total = sum(self.counts)
        each = self.integers(self.size, total, self.columns)
        own = self.of_ranks(each.double().sum(0).to(self.dtype))[self.rank]
        x = each[self.rank]
        if self.random.random() < 0.3:
            found = nvls.reduce_scatter_v(as_passed(self.random, x), self.counts, **self.named)
            assert torch.equal(found, own)
            return
        x = torch.cat([x, x.new_full((self.random.randrange(3), self.columns), -LEFT)])
        if self.random.random() < 0.3 and x.numel():
            x = self.workspace.empty(x.shape, x.dtype).copy_(x)
        else:
            x = as_passed(self.random, x)
        out = self.left(self.most, self.columns)
        found = nvls.reduce_scatter_v(x, self.on_device(), out=out, **self.named)
        assert found is out
        assert torch.equal(found[: len(own)], own)
        assert (found[len(own) :] == LEFT).all()

    def gather_to_rank(self) -> None:

        each = self.integers(self.size, self.most, self.columns)
        dim, destination = self.random.choice([0, -1]), self.random.randrange(self.size)
        out = None if self.random.random() < 0.5 else torch.cat([*each], dim)
        out = None if out is None else self.left(*out.shape)
        named = self.named | {"algo": self.random.choice(["p2p", "auto", "dist"])}
        found = nvls.gather_to_rank(
            as_passed(self.random, each[self.rank]),
            out=out,
            dim=dim,
            destination=destination,
            **named,
        )
        if self.rank != destination:
            assert found is None
            assert out is None or (out == LEFT).all()
            return
        assert found is not None
        assert out is None or found is out
        assert torch.equal(found, torch.cat([*each], dim))


def run_cases(rank: int, size: int, num_cases: int) -> None:
    seeds, delays = random.Random(size), random.Random(rank)
    names = ["all_gather_v", "reduce_scatter_v", "gather_to_rank"]
    with opened(1 << 18) as workspace, opened(1 << 18, slots=1) as narrow:
        for number in range(num_cases):
            case = Case(seeds, seeds.choice([workspace, narrow]), rank)
            if delays.randrange(3) == 0:
                time.sleep(0.02)
            try:
                getattr(case, names[number % 3])()
            except AssertionError as problem:
                raise AssertionError(f"{number}: {case.__dict__}") from problem


@ranks(2)
def test_two_ranks_move_the_rows_that_count(rank: int) -> None:
    run_cases(rank, 2, 24)


@ranks(3)
def test_three_ranks_move_the_rows_that_count(rank: int) -> None:
    run_cases(rank, 3, 12)


@pytest.mark.soak
@ranks(5)
def test_five_ranks_move_the_rows_that_count(rank: int) -> None:
    run_cases(rank, 5, 4)


@pytest.mark.soak
@ranks(8)
def test_eight_ranks_move_the_rows_that_count(rank: int) -> None:
    run_cases(rank, 8, 3)


@ranks(2)
def test_counts_out_of_range_are_cut_off_alike(rank: int) -> None:
    """Also where they add up to more than 32 bits hold."""
    with opened(1 << 12) as workspace:
        x = torch.full((2, 4), float(rank))
        for counts, rows in [([-5, 1], [1.0]), ([2**31 - 1] * 2, [0.0, 0.0, 1.0, 1.0])]:
            on_device = torch.tensor(counts, dtype=torch.int32)
            for algo in ("multimem", "p2p", "dist"):
                out = torch.full((5, 4), 7.0)
                nvls.all_gather_v(x, on_device, out=out, workspace=workspace, algo=algo)
                assert out[:, 0].tolist() == rows + [7.0] * (5 - len(rows))
                addends = torch.arange(3.0)[:, None].expand(3, 4)
                out = torch.full((2, 4), 7.0)
                nvls.reduce_scatter_v(addends, on_device, out=out, workspace=workspace, algo=algo)
                own = [[7.0, 7.0], [0.0, 7.0]] if counts[0] < 0 else [[0.0, 2.0], [4.0, 7.0]]
                assert out[:, 0].tolist() == own[rank]


@ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent(rank: int) -> None:
    x, counts = torch.full((4, 8), float(rank)), torch.tensor([4, 4], dtype=torch.int32)
    with opened(1 << 12) as workspace:
        named: dict[str, Any] = {"workspace": workspace}
        for operation in (nvls.all_gather_v, nvls.reduce_scatter_v):
            refused(LayoutError, "3 dimensions", operation, x[None], counts, **named)
            for wrong in (counts.long(), counts[:1], [4], [-1, 9], [4.0, 4.0]):
                with pytest.raises(LayoutError, match="one number of rows for each rank"):
                    operation(x, wrong, **named)
            refused(LayoutError, "4 rows", operation, x, [3, 3], **named)
            with pytest.raises(LayoutError, match="a result of shape"):
                operation(x, counts, out=torch.empty(8, 4), **named)
            with pytest.raises(UnsupportedError, match="no backward"):
                operation(x.clone().requires_grad_(), counts, **named)
            with pytest.raises(UnsupportedError, match="no such kernel"):
                operation(x, counts, algo="lamport", **named)
            with pytest.raises(ConfigError, match="other ranks read"):
                operation(x, counts, out=workspace.empty((8, 8), x.dtype), **named)
        refused(TopologyError, "a group of 2 ranks", nvls.gather_to_rank, x, destination=2, **named)
        refused(LayoutError, "dim=2", nvls.gather_to_rank, x, dim=2, **named)
        with pytest.raises(UnsupportedError, match="no such kernel"):
            nvls.gather_to_rank(x, algo="multimem", **named)
        # Rows of a quarter of a slot: four of them, or five.
        wide = torch.ones(3, 256)
        assert len(nvls.all_gather_v(wide[:2], [2, 2], strict=True, **named)) == 4
        with pytest.raises(UnsupportedError, match="more than a slot"):
            nvls.all_gather_v(wide[: 3 - rank], [3, 2], strict=True, **named)
        # Rows that are no multiple of 16 bytes, and none at all.
        narrow = nvls.all_gather_v(x[:, :3], counts, **named)
        assert narrow[:, 0].tolist() == [0.0] * 4 + [1.0] * 4
        assert nvls.all_gather_v(x[:0], [0, 0], **named).shape == (0, 8)
        assert nvls.reduce_scatter_v(x[:, :0], counts, **named).shape == (4, 0)
