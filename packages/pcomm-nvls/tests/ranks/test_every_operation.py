"""What holds for each of the nine operations: late ranks, entry barriers, one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from pcomm.core.errors import PeerTimeoutError
from pcomm.core.groups.agreement import agree_in_group
from pcomm.core.groups.group import Group
from pcomm.core.testing import ranks
from pcomm.core.testing.default_group import default_group
from pcomm.nvls.testing.emulation import emulate


def opened(**options: Any) -> Any:
    emulate()
    from pcomm.nvls.workspace.workspace import Workspace

    return Workspace(Group.from_process_group("tp", default_group()), 1 << 14, **options)


def calls_of(workspace: Any) -> dict[str, Callable[[], Any]]:
    """A call of each operation, by multicast where it has such a kernel; all ranks pass ones.

    An all-reduce of this size has two barriers between 2 ranks: see `test_numbers_of_barriers`.
    """
    from pcomm.nvls.bench.calls import calls

    found = calls(workspace, rows=4, hidden=512)
    kernels = {name: found[name, algo] for name, algo in found if algo == "p2p"}
    return kernels | {name: found[name, algo] for name, algo in found if algo == "multimem"}


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [x for x in result or () if x is not None]


@ranks(2)
def test_a_rank_that_comes_after_the_limit_of_another_gets_no_numbers(rank: int) -> None:
    """Neither where it would find a signal that the other one has given in advance."""
    with opened() as workspace:
        known = list(calls_of(workspace))
    assert len(known) == 9
    two_barriers = ["all_reduce", "all_reduce_add_rmsnorm", "reduce_scatter_add_rmsnorm_all_gather"]
    # With a slot that an operation had before, each begins with one more.
    for name, needs_entry in [*product(known, [True]), *product(two_barriers, [False])]:
        with opened(slots=1, timeout_s=0.05) as workspace:
            call = calls_of(workspace)[name]
            if needs_entry:
                workspace.turn()
            if rank == 0:
                with pytest.raises(PeerTimeoutError, match="rank 1"):
                    call()
            agree_in_group(workspace.group, "test: rank 0 has gone through its limit", [])
            if rank == 1:
                with pytest.raises(PeerTimeoutError, match="rank 0"):
                    call()
