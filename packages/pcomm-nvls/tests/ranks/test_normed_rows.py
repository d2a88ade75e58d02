"""The fused operations under emulation, in random order, against the norm of exact sums.

Every rank makes what all ranks pass from one seed. Addends and residual are integers, so that
sums are exact in any order and kernels have to return the bits of the reference; its norm is
tested against that of torch in `tests/unit`.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from nvls_support.emulation import opened
from pcomm import nvls
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.core.testing import ranks
from pcomm.nvls.references import fp8_rows, rms_norm

SUMMED = [torch.bfloat16, torch.float16, torch.float32]
# A block holds 128 vectors of 16 bytes at least, with fp8 256.
WIDTHS = [2, 6, 50, 128, 130, 258]
EPS = 1e-5


def as_passed(case: random.Random, x: Tensor) -> Tensor:
    """The tensor dense, with other strides, or at an address that is no multiple of 16."""
    way = case.randrange(4)
    if way == 0:
        return x.t().contiguous().t()
    if way == 1:
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    return x.clone()


def shifted(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows, and a view of as many as `num_rows` of the memory one row behind them."""
    memory = torch.cat([rows, rows[:1]])
    return memory[:-1], memory[1 : num_rows + 1]


class Case:
    """One random call, equal on all ranks, and its check on this one."""

    def __init__(self, case: random.Random, workspace: Any, rank: int, number: int) -> None:
        self.random, self.rank, self.workspace, self.number = case, rank, workspace, number
        self.size: int = workspace.group.size
        self.named = {"workspace": workspace, "algo": case.choice(["multimem", "p2p"])}
        if number % 7 == 6:
            self.named["algo"] = "dist"
        # Of the scales one cuts off most numbers, and with one they are subnormal.
        self.fp8: Any = [None, "rows", 0.001, 0.01, 100.0][number // 2 % 5]
        if isinstance(self.fp8, float):
            self.fp8 = torch.tensor([self.fp8])
        half = number % 2 and self.fp8 is not None
        self.dtype = case.choice(SUMMED[:2] if half else SUMMED)
        self.hidden = case.choice(WIDTHS) * 16 // self.dtype.itemsize

    def integers(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randint(-9, 10, shape, generator=generator).to(self.dtype)

    def weight(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randn(self.hidden, generator=generator).to(self.dtype)

    def input(self, x: Tensor) -> Tensor:
        if self.random.random() < 0.3:
            return self.workspace.empty(x.shape, x.dtype).copy_(x)
        return as_passed(self.random, x)

    def all_reduce(self) -> None:

        shape = (self.random.randrange(1, 2 * self.size + 2), self.hidden)
        addends, residual, weight = (
            self.integers(self.size, *shape),
            self.integers(*shape),
            self.weight(),
        )
        stream = (addends.double().sum(0) + residual.double()).to(self.dtype)
        x, old = self.input(addends[self.rank]), as_passed(self.random, residual)
        out = residual_out = None
        way = self.random.choice(["new", "own", "other", "shifted"])
        if way != "new":
            x = as_passed(self.random, addends[self.rank])
            out, residual_out = (x, old) if way == "own" else (old, x)
        if way == "shifted":
            x, residual_out = shifted(addends[self.rank], len(old))
        row = as_passed(self.random, weight[None])[0]
        found = nvls.all_reduce_add_rmsnorm(
            x, old, row, EPS, out=out, residual_out=residual_out, **self.named
        )
        assert found.scales is None
        assert out is None or (found.rows is out and found.residual is residual_out)
        assert torch.equal(found.residual, stream)
        assert torch.equal(found.rows, rms_norm(stream, weight, EPS))

    def reduce_scatter(self) -> None:

        share = self.random.randrange(1, 4)
        shape = (share * self.size, self.hidden)
        addends, residual, weight = (
            self.integers(self.size, *shape),
            self.integers(*shape),
            self.weight(),
        )
        own = slice(self.rank * share, (self.rank + 1) * share)
        stream = (addends.double().sum(0) + residual.double()).to(self.dtype)
        rows, scales = rms_norm(stream, weight, EPS), None
        fp8 = self.fp8
        if fp8 is not None:
            rows, scales = fp8_rows(rows, fp8 if isinstance(fp8, Tensor) else None)
            scales = scales if fp8 == "rows" else None
        x, old = self.input(addends[self.rank]), as_passed(self.random, residual[own])
        out = residual_out = None
        way = self.random.choice(["new", "own", "shifted"])
        if way != "new":
            residual_out = old
            x = as_passed(self.random, addends[self.rank])
            out = x if fp8 is None else as_passed(self.random, torch.zeros_like(rows))
        if way == "shifted":
            x, residual_out = shifted(addends[self.rank], len(old))
        found = nvls.reduce_scatter_add_rmsnorm_all_gather(
            x, old, weight, EPS, out=out, residual_out=residual_out, fp8=fp8, **self.named
        )
        assert out is None or (found.rows is out and found.residual is residual_out)
        assert torch.equal(found.residual, stream[own])
        assert found.rows.dtype == rows.dtype
        assert torch.equal(found.rows.contiguous().view(torch.uint8), rows.view(torch.uint8))
        assert (found.scales is None) == (scales is None)
        assert scales is None or found.scales is None or torch.equal(found.scales, scales)


def run_cases(rank: int, size: int, num_cases: int) -> None:
    seeds, delays = random.Random(size), random.Random(rank)
    with opened(1 << 18) as workspace, opened(1 << 18, slots=1) as narrow:
        for number in range(num_cases):
            case = Case(seeds, seeds.choice([workspace, narrow]), rank, number)
            if delays.randrange(3) == 0:
                time.sleep(0.02)
            try:
                case.reduce_scatter() if number % 2 else case.all_reduce()
            except AssertionError as problem:
                raise AssertionError(f"{number}: {case.__dict__}") from problem


# Ten have each form of 8 bits once.
@pytest.mark.parametrize("num_cases", [10, pytest.param(40, marks=pytest.mark.soak)])
@ranks(2)
def test_two_ranks_add_and_norm_rows(rank: int, num_cases: int) -> None:
    run_cases(rank, 2, num_cases)


@ranks(3)
def test_three_ranks_add_and_norm_rows(rank: int) -> None:
    run_cases(rank, 3, 6)


@pytest.mark.soak
@ranks(4)
def test_four_ranks_add_and_norm_rows(rank: int) -> None:
    run_cases(rank, 4, 4)


@pytest.mark.soak
@ranks(8)
def test_eight_ranks_add_and_norm_rows(rank: int) -> None:
    run_cases(rank, 8, 2)


@ranks(2)
def test_rows_of_numbers_that_are_rounded_are_as_close_as_the_reference(rank: int) -> None:
    """Each step against fp64, from what the step before returned."""
    generator = torch.Generator().manual_seed(0)
    with opened(1 << 14, deterministic=True) as workspace:
        for dtype in SUMMED:
            unit = torch.finfo(dtype).eps / 2
            numbers = torch.randn(4, 3, 200, generator=generator)
            addends, residual, weight = (
                numbers[:2].to(dtype),
                numbers[2].to(dtype),
                numbers[3, 0].to(dtype),
            )
            found = [
                nvls.all_reduce_add_rmsnorm(
                    addends[rank], residual, weight, EPS, workspace=workspace, algo=algo
                )
                for algo in ("p2p", "dist")
            ]
            # In rank order either way, so that the stream has the same bits.
            assert torch.equal(found[0].residual, found[1].residual)
            total = addends.double().sum(0)
            largest = addends.double().abs().sum(0) + residual.double().abs()
            off = (found[0].residual.double() - total - residual.double()).abs()
            # The sum is rounded, then the stream; in fp32 both additions are of that precision.
            assert (off <= 2.1 * unit * largest).all()
            stream = found[0].residual.double()
            exact = stream / (stream.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
            for one in found:
                # fp32 has 200 additions of squares and five more roundings before the last one.
                bound = (unit + 105 * 2.0**-24) * exact.abs() * 1.01
                assert ((one.rows.double() - exact).abs() <= bound).all()


@ranks(2)
def test_rows_that_do_not_fit_are_refused_before_anything_is_sent(rank: int) -> None:
    x, weight = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    with opened(1 << 18) as workspace:
        named: dict[str, Any] = {"workspace": workspace}
        inside = workspace.empty(x.shape, x.dtype)
        for operation, residual in (
            (nvls.all_reduce_add_rmsnorm, x),
            (nvls.reduce_scatter_add_rmsnorm_all_gather, x[:2]),
        ):
            for wrong in ((x[None], residual), (x, x[:3]), (x, residual.float())):
                with pytest.raises(LayoutError, match="all floating-point numbers of one dtype"):
                    operation(*wrong, weight, EPS, **named)
            with pytest.raises(LayoutError, match="all floating-point numbers of one dtype"):
                operation(x, residual, weight[:8], EPS, **named)
            with pytest.raises(UnsupportedError, match="no backward"):
                operation(x, residual, weight.clone().requires_grad_(), EPS, **named)
            with pytest.raises(LayoutError, match="a result of shape"):
                operation(x, residual, weight, EPS, out=x[:1], **named)
            with pytest.raises(ConfigError, match="other ranks read"):
                operation(x, residual, weight, EPS, residual_out=inside[: len(residual)], **named)
            with pytest.raises(UnsupportedError, match="no such kernel"):
                operation(x, residual, weight, EPS, algo="lamport", **named)
        with pytest.raises(LayoutError, match="all floating-point numbers of one dtype"):
            nvls.reduce_scatter_add_rmsnorm_all_gather(x[:3], x[:1], weight, EPS, **named)
        for fp8 in ("columns", torch.ones(2), torch.ones(1, dtype=torch.bfloat16)):
            with pytest.raises(LayoutError, match='fp8="rows" or one fp32 number'):
                nvls.reduce_scatter_add_rmsnorm_all_gather(x, x[:2], weight, EPS, fp8=fp8, **named)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="Sixteen numbers"):
            nvls.reduce_scatter_add_rmsnorm_all_gather(
                x[:, :8], x[:2, :8], weight[:8], EPS, fp8="rows", **named
            )
        # One number more than the longest row of a kernel goes through torch.distributed.
        long = torch.ones(1, 16392)
        with pytest.raises(LayoutError, match="more than 16384 numbers"):
            nvls.all_reduce_add_rmsnorm(long, long, long[0], EPS, strict=True, **named)
        assert nvls.all_reduce_add_rmsnorm(
            long, long, long[0], EPS, **named
        ).residual.unique().tolist() == [3.0]
        longest = torch.ones(1, 16384)
        found = nvls.all_reduce_add_rmsnorm(longest, longest, longest[0], 0.0, algo="p2p", **named)
        assert found.residual.unique().tolist() == [3.0]
        assert found.rows.unique().tolist() == [1.0]
        assert nvls.all_reduce_add_rmsnorm(x[:0], x[:0], weight, EPS, **named).rows.shape == (0, 16)


@ranks(2)
def test_rows_of_nan_have_the_scale_of_the_reference(rank: int) -> None:
    x, weight = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    x[0, 3], x[3] = float("nan"), 0.0
    with opened(1 << 14) as workspace:
        named: dict[str, Any] = {"workspace": workspace, "fp8": "rows"}
        found = nvls.reduce_scatter_add_rmsnorm_all_gather(
            x, 0 * x[1:3], weight, EPS, algo="p2p", **named
        )
        wanted = nvls.reduce_scatter_add_rmsnorm_all_gather(
            x, 0 * x[1:3], weight, EPS, algo="dist", **named
        )
        assert found.scales.tolist() == wanted.scales.tolist()
        assert found.scales[[0, 3]].tolist() == [2.0**-64] * 2
        torch.testing.assert_close(
            found.rows.float(), wanted.rows.float(), rtol=0, atol=0, equal_nan=True
        )
