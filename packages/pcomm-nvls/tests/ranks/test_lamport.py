"""The operations without barriers under emulation, back to back and among those that have them.

Every rank makes what all ranks pass from the same seed, and compares bit for bit. After each
operation the slot that it had to clear is looked at.
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
from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import ConfigError, PeerError, PeerTimeoutError, UnsupportedError
from pcomm.core.testing import ranks
from pcomm.core.testing.programs import PATIENCE_S

SUMMED = [torch.bfloat16, torch.float16, torch.float32]
ANY_BITS = [torch.uint8, torch.int64, torch.float64]
# A block moves 128 vectors of 16 bytes at a time, two blocks take turns, and this is the most.
VECTORS = [1, 1, 2, 2, 127, 128, 129, 256, 257, 320]
MOST_BYTES = 320 * 16
# Signs of zero, what is not finite, and the least number that there is in fp32.
UNUSUAL = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1.0, -2.5])


def all_inputs(shared: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """What each rank passes, in this order along dimension 0."""
    generator = torch.Generator().manual_seed(shared.randrange(1 << 30))
    kind = shared.choice(["zeros", "integers", "unusual", "bits"])
    if dtype in ANY_BITS:
        num_bytes = shape[-1] * dtype.itemsize
        raw = torch.randint(0, 256, (*shape[:-1], num_bytes), generator=generator)
        if kind != "bits":
            # Many words that would say that nothing is there.
            raw *= raw % 3 == 0
            raw[..., 3::4] = 128
        return raw.to(torch.uint8).view(dtype)
    if kind == "zeros":
        return torch.full(shape, -0.0 if shared.random() < 0.5 else 0.0, dtype=dtype)
    if kind == "unusual":
        return UNUSUAL[torch.randint(0, len(UNUSUAL), shape, generator=generator)].to(dtype)
    if kind == "integers":
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator).exp2() * 3).to(dtype)


def arriving(x: Tensor) -> Tensor:
    """What other ranks get of floats: the words 0x80000000 are 0."""
    words = x.contiguous().view(torch.int32)
    return torch.where(words == -(1 << 31), 0, words).view(x.dtype)


def summed(all_x: Tensor) -> Tensor:
    """The sum in fp32 in rank order, rounded once."""
    total = torch.zeros_like(all_x[0], dtype=torch.float32)
    for x in all_x:
        total = total + x.float()
    return total.to(all_x.dtype)


class Case:
    """One random call, equal on all ranks, and its check on this one."""

    def __init__(self, shared: random.Random, workspace: Any, rank: int) -> None:
        self.random, self.workspace, self.rank = shared, workspace, rank
        self.size = workspace.group.size
        self.named = {"workspace": workspace, "algo": "lamport"}
        self.vectors = shared.choice(VECTORS)

    def all_gather(self) -> None:

        dtype = self.random.choice([*SUMMED, *ANY_BITS])
        vectors = min(self.vectors, 160) if dtype in ANY_BITS else self.vectors
        rows = self.random.choice([n for n in (1, 2, 3) if vectors % n == 0])
        shape = (rows, vectors // rows * 16 // dtype.itemsize)
        all_x, dim = (
            all_inputs(self.random, dtype, (self.size, *shape)),
            self.random.choice([0, -1]),
        )
        found = nvls.all_gather_into_tensor(all_x[self.rank].clone(), dim=dim, **self.named)
        expected = torch.cat([x if dtype in ANY_BITS else arriving(x) for x in all_x], dim)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))

    def all_reduce(self) -> None:

        dtype = self.random.choice(SUMMED)
        all_x = all_inputs(self.random, dtype, (self.size, self.vectors * 16 // dtype.itemsize))
        x = self.input(all_x[self.rank])
        out = None
        if self.random.random() < 0.3:
            x = out = x.clone()
        check(nvls.all_reduce(x, out=out, **self.named), summed(all_x))

    def reduce_scatter(self) -> None:

        dtype, dim = self.random.choice(SUMMED), self.random.choice([0, -1])
        columns = self.vectors * 16 // dtype.itemsize
        shape = (self.size, columns) if dim == 0 else (columns * self.size,)
        all_x = all_inputs(self.random, dtype, (self.size, *shape))
        x = self.input(all_x[self.rank])
        found = nvls.reduce_scatter_tensor(x, dim=dim, **self.named)
        check(found, summed(all_x).chunk(self.size, dim)[self.rank])

    def with_barrier(self) -> None:

        all_x = all_inputs(self.random, torch.float32, (self.size, 4 * self.vectors))
        found = nvls.all_reduce(all_x[self.rank], workspace=self.workspace, algo="p2p")
        check(found, summed(all_x))

    def input(self, x: Tensor) -> Tensor:
        """A copy, sometimes in the slot whose turn it is."""
        if self.random.random() < 0.2:
            return self.workspace.empty(x.shape, x.dtype).copy_(x)
        return x.clone()

    def check_cleared(self) -> None:
        """The slot of the operation before the last one: the next but one is stored there."""
        known = self.workspace.lamport_arguments()
        number, ticket, _ = known["state"].tolist()
        place = known["region"] + (number + 1) % 3 * known["slot_bytes"]
        slot = self.workspace.memory.buffer()[place : place + known["slot_bytes"]]
        assert (slot.view(torch.int32) == -(1 << 31)).all()
        assert ticket == 0


def check(found: Tensor, expected: Tensor) -> None:
    """Equal numbers, NaN to NaN; the sign of a zero does not count."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@contextmanager
def workspace_of(timeout_s: float = PATIENCE_S) -> Iterator[Any]:
    with opened(4 * MOST_BYTES, lamport_bytes=MOST_BYTES, timeout_s=timeout_s) as workspace:
        yield workspace


def run_cases(rank: int, size: int, num_cases: int) -> None:
    shared = random.Random(size)
    with workspace_of() as workspace:
        # Counting begins again among these operations.
        from pcomm.nvls.primitives.lamport_numbers import OPERATION_NUMBERS

        workspace.lamport_arguments()["state"][0] = OPERATION_NUMBERS - 3
        agree_in_group(workspace.group, "test: numbers are set", [])
        for number in range(num_cases):
            case = Case(shared, workspace, rank)
            kinds = [case.all_gather, case.all_reduce, case.reduce_scatter]
            kind = shared.choice([*kinds, *kinds, case.with_barrier])
            # Any rank may be the last one, by a part of an operation or by several.
            if random.randrange(2 * size) == 0:
                time.sleep(random.choice([0.001, 0.01, 0.05]))
            try:
                kind()
                case.check_cleared()
            except AssertionError as error:
                error.add_note(f"case {number}: {kind.__name__}, {case.vectors} vectors")
                raise
        assert 0 < workspace.lamport_arguments()["state"][0] < num_cases


@ranks(2)
def test_two_ranks(rank: int) -> None:
    run_cases(rank, 2, 24)


@ranks(3)
def test_three_ranks(rank: int) -> None:
    run_cases(rank, 3, 8)


@pytest.mark.soak
@ranks(4)
def test_four_ranks(rank: int) -> None:
    run_cases(rank, 4, 8)


@pytest.mark.soak
@ranks(8)
def test_eight_ranks(rank: int) -> None:
    run_cases(rank, 8, 4)


@ranks(2)
def test_sizes_on_both_sides_of_the_room(rank: int) -> None:
    with workspace_of() as workspace:

        def operations() -> int:
            return int(workspace.lamport_arguments()["state"][0])

        named = {"workspace": workspace, "algo": "lamport"}
        whole = torch.ones(MOST_BYTES // 4)
        assert nvls.all_gather_into_tensor(whole, **named).sum() == 2 * len(whole)
        assert (
            nvls.all_gather_into_tensor(torch.ones(MOST_BYTES // 2).byte(), **named).sum()
            == MOST_BYTES
        )
        assert nvls.all_reduce(whole, **named).unique().tolist() == [2]
        assert nvls.reduce_scatter_tensor(whole.repeat(2), **named).unique().tolist() == [2]
        # Nothing is sent of nothing: no rank would wait for another one.
        nvls.all_gather_into_tensor(whole[:0], **named)
        assert operations() == 4
        more = torch.ones(MOST_BYTES // 4 + 4)
        for operation, x in (
            (nvls.all_gather_into_tensor, more),
            (nvls.all_gather_into_tensor, torch.ones(MOST_BYTES // 2 + 16, dtype=torch.uint8)),
            (nvls.all_reduce, more),
            (nvls.reduce_scatter_tensor, more.repeat(2)),
        ):
            refused(UnsupportedError, "more than lamport_bytes", operation, x, **named)
        # The table of the emulation has the choice change at 1,024 bytes.
        for length, without_barrier in ((256, 1), (260, 0)):
            before = operations()
            nvls.all_reduce(torch.ones(length), workspace=workspace)
            assert operations() - before == without_barrier


@ranks(2)
def test_one_launch_can_be_replayed(rank: int) -> None:
    """As a CUDA graph does: its arguments stay, and what counts is on the device."""
    with workspace_of() as workspace:
        from pcomm.nvls.collectives.reductions import all_reduce_launch
        from pcomm.nvls.policy.choose import Choice

        x, out = torch.ones(4 * 129), torch.empty(4 * 129)
        launch = all_reduce_launch(workspace, Choice("lamport", 2, 4, ""), out, x)
        for replay in range(5):
            x.fill_(replay + rank)
            workspace.run(launch)
            assert out.unique().tolist() == [2 * replay + 1]
            if replay % 2:
                y = torch.full((8 * replay,), float(rank))
                found = nvls.all_gather_into_tensor(y, workspace=workspace, algo="lamport")
                assert found.tolist() == [0.0] * len(y) + [1.0] * len(y)


@ranks(3)
def test_an_input_that_others_may_write_to_is_refused(rank: int) -> None:
    with workspace_of() as workspace:
        named = {"workspace": workspace, "algo": "lamport"}
        view = workspace.empty((3, 8), torch.float32).fill_(rank + 1)
        assert nvls.reduce_scatter_tensor(view, **named).unique().tolist() == [6]
        refused(ConfigError, "a view of the workspace", nvls.reduce_scatter_tensor, view, **named)


@ranks(3)
def test_a_rank_that_does_not_come_is_named(rank: int) -> None:
    with workspace_of() as workspace:
        # What the first call imports may take one rank longer than the time below.
        nvls.all_gather_into_tensor(torch.ones(4), workspace=workspace, algo="lamport")
    with workspace_of(timeout_s=1.0) as workspace:
        named = {"workspace": workspace, "algo": "lamport"}
        nvls.all_gather_into_tensor(torch.ones(4), **named)
        agree_in_group(workspace.group, "test: the first one is over", [])
        if rank != 2:
            with pytest.raises(PeerTimeoutError, match=r"rank 2 did not signal within 1 s"):
                nvls.all_reduce(torch.ones(4), **named)
            refused(PeerTimeoutError, "rank 2", nvls.all_gather_into_tensor, torch.ones(4), **named)
        agree_in_group(workspace.group, "test: all are through", [])


@ranks(2)
def test_a_workspace_without_room_has_no_such_operations(rank: int) -> None:
    with opened(1 << 12, lamport_bytes=0) as workspace:
        assert nvls.all_reduce(torch.ones(4), workspace=workspace).tolist() == [2] * 4
        with pytest.raises(UnsupportedError, match="lamport_bytes of the workspace, 0 bytes"):
            nvls.all_reduce(torch.ones(4), workspace=workspace, algo="lamport")
    with pytest.raises(ConfigError if rank else PeerError, match="lamport_bytes=-1"):
        opened(1 << 12, lamport_bytes=-1 if rank else 0)
