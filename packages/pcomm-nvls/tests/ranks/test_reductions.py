"""Reduce-scatter, all-reduce and coalesced all-gather under emulation, in random order.

What they return is compared with sums in fp64 of what all ranks passed, which every rank makes
from the same seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nvls_support.emulation import opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.core.testing import ranks

SUMMED = [torch.bfloat16, torch.float16, torch.float32]
# A block moves 128 vectors of 16 bytes at a time, and 2 or 4 blocks a launch do it in turn; from
# four times as many vectors as they have threads, 512 at a time.
VECTORS = [1, 2, 127, 128, 129, 255, 257, 300, 513, 2047, 2048, 2500]


def tensors(case: random.Random, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> Tensor:
    """What each rank passes: integers whose sums are exact, or numbers of all magnitudes."""
    generator = torch.Generator().manual_seed(case.randrange(1 << 30))
    if case.random() < 0.3:
        return torch.randint(-9, 10, (size, *shape), generator=generator).to(dtype)
    magnitude = torch.randn(size, *shape, generator=generator).exp2()
    return (torch.randn(size, *shape, generator=generator) * magnitude).to(dtype)


def check_sum(found: Tensor, of_ranks: Tensor) -> None:
    """A sum in fp32 that was rounded once, against one in fp64.

    Each of the additions rounds by 2^-24 of a sum that is at most that of the magnitudes; the end
    result by half a unit in its last place, or in that of the smallest number.
    """
    exact = of_ranks.double().sum(0)
    unit = torch.finfo(found.dtype)
    added = len(of_ranks) * 2.0**-24 * of_ranks.double().abs().sum(0)
    rounded = (exact.abs() + added) * unit.eps / 2 + unit.smallest_normal * unit.eps
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= added + rounded).all()


def as_passed(case: random.Random, x: Tensor) -> Tensor:
    """The tensor dense, with other strides, or at an address that is no multiple of 16."""
    way = case.randrange(4)
    if way == 0 and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if way == 1:
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    return x.clone()


class Case:
    """One random call, equal on all ranks, and its check on this one."""

    def __init__(self, random: random.Random, workspaces: list[Any], rank: int) -> None:
        self.random, self.rank = random, rank
        self.workspace = random.choice(workspaces)
        self.size = self.workspace.group.size
        algos = ["auto", "p2p"] if self.workspace.deterministic else ["auto", "multimem", "p2p"]
        self.named = {"workspace": self.workspace, "algo": random.choice(algos)}
        self.dtype = random.choice(SUMMED)
        self.vector = 16 // self.dtype.itemsize

    def input(self, x: Tensor) -> Tensor:
        if self.random.random() < 0.2:
            return self.workspace.empty(x.shape, x.dtype).copy_(x)
        return as_passed(self.random, x)

    def result(self, shape: tuple[int, ...]) -> Tensor | None:
        if self.random.random() < 0.3:
            return None
        return as_passed(self.random, torch.full(shape, 7.0, dtype=self.dtype))

    def reduce_scatter(self) -> str:

        vectors, dim = self.random.choice(VECTORS), self.random.choice([0, -1])
        rows = self.random.choice([n for n in (1, 2, 3, 9, vectors) if vectors % n == 0])
        columns = vectors // rows * self.vector
        whole = (rows * self.size, columns) if dim == 0 else (rows, columns * self.size)
        all_x = tensors(self.random, self.dtype, whole, self.size)
        x = self.input(all_x[self.rank])
        out = self.result((rows, columns))
        found = nvls.reduce_scatter_tensor(x, out=out, dim=dim, **self.named)
        assert out is None or found is out
        check_sum(found, all_x.chunk(self.size, dim % 2 + 1)[self.rank])
        return f"{whole} dim {dim}"

    def all_reduce(self) -> str:

        shape = (self.random.choice(VECTORS) * self.vector,)
        all_x = tensors(self.random, self.dtype, shape, self.size)
        x = self.input(all_x[self.rank])
        out = self.result(shape)
        if self.random.random() < 0.3:
            x = out = all_x[self.rank].clone()
        found = nvls.all_reduce(x, out=out, **self.named)
        assert out is None or found is out
        check_sum(found, all_x)
        return f"{shape}"

    def all_gather(self) -> str:

        vectors = [self.random.choice([0, 1, 2, 130]) for _ in range(self.random.randrange(1, 10))]
        all_xs = [tensors(self.random, self.dtype, (n * self.vector,), self.size) for n in vectors]
        xs = [as_passed(self.random, all_x[self.rank]) for all_x in all_xs]
        outs = [self.result((self.size * len(x),)) for x in xs]
        found = nvls.all_gather_coalesced(xs, outs=outs, **self.named)
        for out, one, all_x in zip(outs, found, all_xs, strict=True):
            assert out is None or one is out
            assert torch.equal(one, all_x.flatten())
        return f"{vectors}"


def run_cases(rank: int, size: int, num_cases: int) -> None:
    with workspaces() as both:
        shared = random.Random(size)
        kinds: list[str] = []
        for number in range(num_cases):
            case = Case(shared, both, rank)
            kinds = kinds or shared.sample(["reduce_scatter", "all_reduce", "all_gather"], 3)
            kind = getattr(case, kinds.pop())
            if shared.randrange(3 * size) == rank:
                time.sleep(0.01)
            try:
                kind()
            except AssertionError as error:
                error.add_note(f"case {number}: {kind.__name__}, {case.named}, {case.dtype}")
                raise


@contextmanager
def workspaces(max_bytes: int = 1 << 18) -> Iterator[list[Any]]:
    """Two of one group: with two slots, and with one that adds in rank order."""
    with opened(max_bytes) as first, opened(max_bytes, slots=1, deterministic=True) as second:
        yield [first, second]


@pytest.mark.parametrize("num_cases", [15, pytest.param(48, marks=pytest.mark.soak)])
@ranks(2)
def test_two_ranks(rank: int, num_cases: int) -> None:
    run_cases(rank, 2, num_cases)


@ranks(3)
def test_three_ranks(rank: int) -> None:
    run_cases(rank, 3, 9)


@pytest.mark.soak
@ranks(4)
def test_four_ranks(rank: int) -> None:
    run_cases(rank, 4, 9)


@pytest.mark.soak
@ranks(8)
def test_eight_ranks(rank: int) -> None:
    run_cases(rank, 8, 3)


@ranks(3)
def test_kernels_that_read_from_peers_add_as_the_reference_does(rank: int) -> None:
    """Bit for bit, and on every rank the same; also what fp32 cannot hold exactly."""
    with workspaces() as (_, ordered):
        named = {"workspace": ordered}
        for dtype in SUMMED:
            # Sums of these depend on their order, bf16 and fp16 overflow, and 257 and 2049 lie
            # half-way between two numbers of theirs.
            values = [1.0, -1e30, 1e30, 3e-39, float("inf"), -0.0, 60000.0, 1e-8]
            values += [0.0, 256.0, 1.0, 0.0, 2048.0, 1.0, 0.0, 3.0]
            x = torch.tensor(values).to(dtype).roll(rank).repeat(36)
            for vectors in (9, 72):
                x_cut = x[: 16 // dtype.itemsize * vectors]
                for dim in (0, -1):
                    y = x_cut.view(3, -1)
                    found = nvls.reduce_scatter_tensor(y, dim=dim, algo="p2p", **named)
                    expected = nvls.reduce_scatter_tensor(y, dim=dim, algo="dist", **named)
                    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
                found = nvls.all_reduce(x_cut, algo="p2p", **named)
                expected = nvls.all_reduce(x_cut, algo="dist", **named)
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        # Without kernels for its type.
        integers = torch.arange(6).view(3, 2) + rank
        assert nvls.reduce_scatter_tensor(integers, **named).tolist() == [
            [6 * rank + 3, 6 * rank + 6]
        ]
        assert nvls.all_reduce(integers, **named).flatten().tolist() == list(range(3, 21, 3))


@ranks(2)
def test_results_over_their_inputs(rank: int) -> None:
    """A vector behind the input's beginning, where another block reads what one writes."""
    with workspaces() as (workspace, _):
        named = {"workspace": workspace, "algo": "p2p"}
        of_ranks = torch.arange(2 * 2 * 1200.0).view(2, 2, 1200)
        total = of_ranks.sum(0)
        for place in (-4, 0, 1204):
            memory = torch.zeros(4 + 3 * 1200 + 4)
            x = memory[4:2404].view(2, 1200).copy_(of_ranks[rank])
            out = memory[4 + place :][:1200].view(1, 1200)
            assert nvls.reduce_scatter_tensor(x, out=out, **named) is out
            assert torch.equal(out[0], total[rank])
            x.copy_(of_ranks[rank])
            half = out.view(2, 600)
            nvls.reduce_scatter_tensor(x, out=half, dim=1, **named)
            assert torch.equal(half, total.chunk(2, 1)[rank])
            x.copy_(of_ranks[rank])
            whole = memory[4 + place :][:2400].view(2, 1200) if place < 1204 else x
            assert nvls.all_reduce(x, out=whole, **named) is whole
            assert torch.equal(whole, total)
        every = of_ranks[:, 0].flatten()
        for place in (0, 4, 1200, 2400):
            memory = torch.zeros(4 + 3 * 1200)
            x = memory[place:][:1200].copy_(of_ranks[rank, 0])
            assert torch.equal(nvls.all_gather_into_tensor(x, out=memory[:2400], **named), every)
            x.copy_(of_ranks[rank, 0])
            columns = memory[:2400].view(2, 1200)
            nvls.all_gather_into_tensor(x.view(2, 600), out=columns, dim=1, **named)
            assert torch.equal(columns.view(2, 2, 600).transpose(0, 1).flatten(), every)
            # Each lies over the input of the other, and one over that of the second launch.
            two = of_ranks[rank].clone()
            outs = [two[1].view(2, 600), memory[:2400].view(2, 2, 600)[0]]
            inputs = [two[0, 600:].view(1, 600), memory[600:1200].copy_(two[0, :600]).view(1, 600)]
            inputs += [two[1, :8]] * 7
            ninth = nvls.all_gather_coalesced(inputs, outs=[*outs, *[None] * 7], **named)[-1]
            assert torch.equal(ninth, of_ranks[:, 1, :8].flatten())
            assert torch.equal(outs[0], of_ranks[:, 0, 600:])
            assert torch.equal(outs[1], of_ranks[:, 0, :600])


@ranks(2)
def test_long_tensors_are_gathered_together(rank: int) -> None:
    """By four vectors of a thread at a time where the shortest has them, and by one."""
    with workspaces() as (workspace, _):
        for lengths in ((1023, 1024), (1024, 1200), (2047, 2300), (2048, 2049)):
            for algo in ("multimem", "p2p"):
                case = random.Random(sum(lengths))
                of_ranks = [tensors(case, torch.float32, (4 * n,), 2) for n in lengths]
                xs = [one[rank] for one in of_ranks]
                found = nvls.all_gather_coalesced(xs, algo=algo, strict=True, workspace=workspace)
                for one, every in zip(found, of_ranks, strict=True):
                    assert torch.equal(one, every.flatten())


@ranks(2)
def test_numbers_of_barriers(rank: int) -> None:
    """One for eight tensors, one for a small all-reduce, two for a large one."""
    with workspaces() as (workspace, _):

        def barriers(operation: Any, x: Any) -> int:
            epoch = workspace.shared_arguments()["epochs"][1]
            before = int(epoch)
            operation(x, algo="multimem", workspace=workspace)
            return int(epoch) - before

        for number, passed in ((1, 1), (8, 1), (9, 2), (0, 0)):
            ones = [torch.ones(4)] * number
            assert barriers(nvls.all_gather_coalesced, ones) == passed
        assert barriers(nvls.reduce_scatter_tensor, torch.ones(8)) == 1
        # 2 ranks: half of the bytes more than in two steps, which is a barrier's 1,024.
        assert barriers(nvls.all_reduce, torch.ones(512)) == 1
        assert barriers(nvls.all_reduce, torch.ones(516)) == 2


@ranks(2)
def test_what_does_not_fit_is_refused(rank: int) -> None:
    with workspaces(1 << 12) as (workspace, _):
        named = {"workspace": workspace}
        x = torch.ones(4, 8)
        for dim in (0, 1):
            with pytest.raises(LayoutError, match=f"dim={dim} among 2 ranks"):
                nvls.reduce_scatter_tensor(torch.ones(3, 7), dim=dim, **named)
        refused(LayoutError, "dim=2", nvls.reduce_scatter_tensor, x, dim=2, **named)
        with pytest.raises(LayoutError, match="a result of shape"):
            nvls.reduce_scatter_tensor(x, out=torch.empty(4, 8), **named)
        refused(LayoutError, "a result of shape", nvls.all_reduce, x, out=torch.empty(32), **named)
        with pytest.raises(LayoutError, match="1 tensors for the results"):
            nvls.all_gather_coalesced([x, x], outs=[None], **named)
        with pytest.raises(LayoutError, match=r"a tensor of shape \(\)"):
            nvls.all_gather_coalesced([torch.tensor(1.0)], **named)
        for operation in (nvls.all_reduce, nvls.reduce_scatter_tensor):
            refused(UnsupportedError, "no backward", operation, x.clone().requires_grad_(), **named)
            refused(UnsupportedError, "do not add", operation, x.long(), strict=True, **named)
        with pytest.raises(UnsupportedError, match="slot"):
            nvls.all_gather_coalesced([torch.ones(512)] * 2, strict=True, **named)
        # One byte more than a multiple of 16 in one tensor, with a sum that is one.
        odd = [torch.full((n,), rank, dtype=torch.uint8) for n in (17, 31)]
        with pytest.raises(UnsupportedError, match="multiple of 16"):
            nvls.all_gather_coalesced(odd, strict=True, **named)
        assert [one.sum().item() for one in nvls.all_gather_coalesced(odd, **named)] == [17, 31]
        view = workspace.empty((4, 8), torch.float32).fill_(rank + 1)
        refused(ConfigError, "out at byte", nvls.all_reduce, view, out=view, algo="p2p", **named)
        assert nvls.all_reduce(view, algo="p2p", **named).unique().tolist() == [3.0]
        refused(ConfigError, "a view of the workspace", nvls.all_reduce, view, algo="p2p", **named)
        assert nvls.all_reduce(x[:, :0], out=x[:, :0], **named).shape == (4, 0)
