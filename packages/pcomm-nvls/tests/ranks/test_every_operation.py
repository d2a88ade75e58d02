"""What holds for each operation: late ranks, entry barriers, calls that differ, one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy
import pytest
import torch

from nvls_support.emulation import opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import ConfigError, DivergenceError, PeerTimeoutError
from pcomm.core.groups.group import Group
from pcomm.core.testing import assert_equal, ranks


def calls_of(workspace: Any) -> dict[str, Callable[[], Any]]:
    """A call of each operation, by multicast where it has such a kernel; all ranks pass ones.

    An all-reduce of this size has two barriers between 2 ranks: see `test_numbers_of_barriers`.
    """
    from nvls_support.calls import calls

    found = calls(workspace, rows=4, hidden=512)
    kernels = {name: found[name, algo] for name, algo in found if algo == "p2p"}
    return kernels | {name: found[name, algo] for name, algo in found if algo == "multimem"}


@ranks(2)
def test_a_rank_that_comes_after_the_limit_of_another_gets_no_numbers(rank: int) -> None:
    """Neither where it would find a signal that the other one has given in advance."""
    with opened(1 << 14) as workspace:
        known = list(calls_of(workspace))
    assert len(known) == 9
    two_barriers = ["all_reduce", "all_reduce_add_rmsnorm", "reduce_scatter_add_rmsnorm_all_gather"]
    # With a slot that an operation had before, each begins with one more.
    for name, needs_entry in [*product(known, [True]), *product(two_barriers, [False])]:
        with opened(1 << 14, slots=1, timeout_s=0.05) as workspace:
            call = calls_of(workspace)[name]
            if needs_entry:
                workspace.turn()
            if rank == 0:
                refused(PeerTimeoutError, "rank 1", call)
            agree_in_group(workspace.group, "test: rank 0 has gone through its limit", [])
            if rank == 1:
                refused(PeerTimeoutError, "rank 0", call)


@ranks(2)
def test_each_meets_the_others_before_it_writes_where_its_slot_may_be_in_use(rank: int) -> None:
    def barriers(workspace: Any, call: Callable[[], Any]) -> int:
        number = workspace.shared_arguments()["epochs"][1]
        before = int(number)
        call()
        return int(number) - before

    with opened(1 << 14) as rotating, opened(1 << 14, slots=1) as in_one_slot:
        in_one_slot.turn()
        free, used = (
            {name: barriers(workspace, call) for name, call in calls_of(workspace).items()}
            for workspace in (rotating, in_one_slot)
        )
    assert sorted(free.values()) == [1] * 6 + [2] * 3
    assert used == {name: number + 1 for name, number in free.items()}


@ranks(2)
def test_what_is_no_tensor_is_refused_by_name_and_the_workspace_goes_on(rank: int) -> None:
    with opened(1 << 14) as workspace:
        named: dict[str, Any] = {"workspace": workspace}
        x = torch.ones(4, 8)
        for wrong, found in ((None, "a NoneType"), (numpy.ones(8), "a ndarray")):
            refused(ConfigError, found, nvls.all_reduce, wrong, **named)
            refused(ConfigError, found, nvls.reduce_scatter_tensor, wrong, **named)
            refused(ConfigError, found, nvls.all_gather_into_tensor, wrong, **named)
            refused(ConfigError, found, nvls.gather_to_rank, wrong, **named)
            refused(ConfigError, found, nvls.all_gather_coalesced, [x, wrong], **named)
            refused(ConfigError, found, nvls.all_gather_v, wrong, [2, 2], **named)
            refused(ConfigError, found, nvls.reduce_scatter_v, wrong, [2, 2], **named)
            for operation in (
                nvls.all_reduce_add_rmsnorm,
                nvls.reduce_scatter_add_rmsnorm_all_gather,
            ):
                refused(ConfigError, found, operation, wrong, x, x[0], 1e-6, **named)
        assert workspace.num_launches == 0
        assert nvls.all_reduce(x, algo="p2p", **named).unique().tolist() == [2.0]


@ranks(2)
def test_with_debug_calls_that_differ_are_an_error_before_they_run(rank: int) -> None:

    with opened(1 << 14, debug=True) as workspace:
        named: dict[str, Any] = {"workspace": workspace, "algo": "p2p"}
        x, turned = torch.ones(4, 8), [1, 3] if rank else [3, 1]
        rows = torch.ones(4, 16, dtype=torch.bfloat16)
        two = [x, torch.ones(2, 8)]

        def fused(**options: Any) -> object:
            operation = nvls.reduce_scatter_add_rmsnorm_all_gather
            return operation(rows, rows[:2], rows[0], 1e-6, **options, **named)

        # Each of the same bytes, so that no rank would notice anything.
        differing: list[Callable[[], object]] = [
            lambda: nvls.gather_to_rank(x, destination=rank, **named),
            lambda: nvls.all_gather_coalesced(two[:: 1 - 2 * rank], **named),
            lambda: nvls.all_gather_coalesced([x, x.int() if rank else x], **named),
            lambda: nvls.all_gather_coalesced([x, x.view(8, 4) if rank else x], **named),
            lambda: nvls.all_gather_into_tensor(x.view(-1, 8 - 4 * rank), **named),
            lambda: nvls.all_gather_v(x[: turned[rank]], turned, **named),
            lambda: nvls.reduce_scatter_v(x, turned, **named),
            lambda: nvls.all_reduce(x.view(-1, 8 - 4 * rank), **named),
            lambda: nvls.all_reduce_add_rmsnorm(x, x, x[0], 1e-6 * (1 + rank), **named),
            lambda: fused(fp8="rows" if rank else None),
            lambda: fused(fp8="rows" if rank else torch.ones(1)),
        ]
        for call in differing:
            refused(DivergenceError, "detail", call)
        assert workspace.num_launches == 0
        # Equal numbers are no difference, and kernels take those of Python.
        numbers = numpy.array([2, 2]) if rank else [2, 2]
        nvls.all_gather_v(x[:2], numbers, **named)
        nvls.reduce_scatter_v(x, numbers, **named)
        nvls.gather_to_rank(x, destination=numpy.int64(1) if rank else 1, **named)
        nvls.all_reduce_add_rmsnorm(x, x, x[0], numpy.float64(1) if rank else 1, **named)
        nvls.reduce_scatter_add_rmsnorm_all_gather(
            x, x[:2], x[0], torch.ones(()) if rank else 1, **named
        )
        assert workspace.num_launches == 5
        for call in calls_of(workspace).values():
            call()
        assert workspace.num_launches == 14


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("algo", ["auto", "p2p", "lamport", "dist"])
def test_one_rank_alone_gets_tensors_of_its_own_whatever_it_asks_for(algo, strict):

    ones = torch.ones(4, 8)
    counts = torch.tensor([4], dtype=torch.int32)
    with nvls.Workspace(Group("tp", (0,), None), 4096, device="cpu") as workspace:
        named: dict[str, Any] = {"workspace": workspace, "algo": algo, "strict": strict}
        meant = torch._neg_view(ones.clone()), ones.to(torch.complex64).conj()
        plain = ones.clone(), ones.bool(), ones.to(torch.float8_e4m3fn), ones.t().clone().t()
        for x in (*plain, *meant):
            kept = x.clone()
            results = [
                nvls.all_reduce(x, **named),
                nvls.all_gather_into_tensor(x, dim=1, **named),
                *nvls.all_gather_coalesced([x, x], **named),
                nvls.gather_to_rank(x, **named),
                nvls.reduce_scatter_tensor(x, **named),
                *(gather(x, n, **named) for gather in (nvls.all_gather_v, nvls.reduce_scatter_v)
                  for n in ([4], counts)),
            ]  # fmt: skip
            for result in results:
                assert result is not None
                assert_equal(result, kept)
                result.fill_(0)
            assert_equal(x, kept)
            assert nvls.all_reduce(x, out=x, **named) is x
        x = torch.ones(1, 1 << 15)  # longer than the rows of a kernel
        for operation in (nvls.all_reduce_add_rmsnorm, nvls.reduce_scatter_add_rmsnorm_all_gather):
            rows, stream, _ = operation(x, x, x[0], 0.0, **named)
            assert_equal(stream, 2 * x)
            assert_equal(rows, x)
        refused(ConfigError, "nccl", nvls.all_reduce, x, workspace=workspace, algo="nccl")
