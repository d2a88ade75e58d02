"""Workspaces: views of slots, several at once, what they leave behind, and debugging."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import pytest
import torch

from core_support.mappings import shared_mappings
from nvls_support.emulation import emulate, opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.errors import ClosedError, ConfigError, DivergenceError, PeerError, PeerTimeoutError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing import ranks
from pcomm.core.topology import Topology


@ranks(2)
def test_views_of_slots_are_valid_until_the_next_operation(rank: int) -> None:
    x = torch.arange(8.0) + 10 * rank
    both = torch.cat([torch.arange(8.0), torch.arange(8.0) + 10])
    with opened() as workspace:
        views = []
        for step, algo in enumerate(["multimem", "p2p", "multimem"]):
            views.append(
                nvls.all_gather_into_tensor(x + step, workspace=workspace, algo=algo, copy=False)
            )
            workspace.check_view(views[-1])
            assert torch.equal(views[-1], both + step)
            for view in views[:-1]:
                refused(ConfigError, f"operation {step} has begun", workspace.check_view, view)
            # What is used late in practice is a part of one.
            for part in (views[-1][3:], views[-1].view(2, 8)[1], views[-1].view(2, 8).t()):
                workspace.check_view(part)
            if step:
                for part in (views[-2][3:], views[-2].view(2, 8)[1]):
                    refused(ConfigError, f"operation {step} has begun", workspace.check_view, part)
        # Of the third operation the memory is that of the first.
        assert views[2].data_ptr() == views[0].data_ptr() != views[1].data_ptr()
        workspace.check_view(x)
        copied = nvls.all_gather_into_tensor(x, workspace=workspace, algo="lamport", copy=False)
        workspace.check_view(copied)
        assert torch.equal(copied, both)


@ranks(2)
def test_an_input_that_was_written_in_place_is_used_once(rank: int) -> None:
    named = {"algo": "multimem"}
    with opened() as workspace:
        view = workspace.empty((64,), torch.float32).fill_(rank + 1)
        # Asked for twice before the operation, it would be the same memory.
        refused(ConfigError, "is still held", workspace.empty, (8,), torch.float32)
        assert nvls.all_reduce(view, workspace=workspace, **named).unique().tolist() == [3]
        for _ in range(2):
            # In the turn of the other slot, and in that of its own, which was not handed out.
            with pytest.raises(ConfigError, match="not handed out"):
                nvls.all_reduce(view, workspace=workspace, **named)
        refused(ConfigError, "max_bytes=4096", workspace.empty, (1025,), torch.float32)
        refused(RuntimeError, "negative dimension", workspace.empty, (-1, -1), torch.float32)
        # One that is gone, as after an error between, is in nobody's way.
        place = workspace.empty((4,), torch.float32).data_ptr()
        small = workspace.empty((4,), torch.float32).fill_(rank)
        assert small.data_ptr() == place
        assert nvls.all_reduce(small, workspace=workspace, **named).tolist() == [1] * 4


@ranks(2)
def test_memory_for_an_input_may_be_had_again_whatever_has_read_it(rank: int) -> None:
    """A loop holds the tensor of the last time when it asks for the next one."""

    weight = torch.ones(16)
    with opened() as workspace:

        def sums_of(view: Any, **options: Any) -> list[Any]:
            named, rows = {"workspace": workspace, **options}, len(view)
            residual = torch.zeros(rows, 16)
            return [
                lambda: nvls.all_reduce(view, **named),
                lambda: nvls.reduce_scatter_tensor(view, **named),
                lambda: nvls.reduce_scatter_v(view, [rows, 0], **named),
                lambda: nvls.all_reduce_add_rmsnorm(view, residual, weight, 0.0, **named)[1],
                lambda: nvls.reduce_scatter_add_rmsnorm_all_gather(
                    view, residual[: rows // 2], weight, 0.0, **named
                )[1],
            ]

        for algo, rows, place in [
            (a, n, i) for a in ("dist", "p2p") for n in (0, 4) for i in range(5)
        ]:
            for step in range(2):
                view = workspace.empty((rows, 16), torch.float32).fill_(rank + step)
                found = sums_of(view, algo=algo)[place]()
                assert torch.equal(found, torch.full_like(found, 1 + 2 * step))
        # What has read another tensor does not count.
        kept = workspace.empty((4, 16), torch.float32).fill_(rank)
        nvls.all_reduce(weight, workspace=workspace, algo="dist")
        refused(ConfigError, "is still held", workspace.empty, (4, 16), torch.float32)
        assert nvls.all_reduce(kept, workspace=workspace, algo="p2p").unique().tolist() == [1]


@ranks(2)
def test_many_workspaces_one_after_another_and_two_at_once(rank: int) -> None:
    """What they leave behind fails the test."""
    x, before = torch.full((16,), float(rank)), shared_mappings()
    for _ in range(8):
        with opened() as first, opened(1 << 13) as second:
            one = nvls.all_reduce(x, workspace=first, algo="p2p")
            two = nvls.all_gather_into_tensor(x, workspace=second, algo="p2p")
            assert one.tolist() == [1.0] * 16
            assert two.tolist() == [0.0] * 16 + [1.0] * 16
    assert not shared_mappings() - before


@ranks(2)
def test_calls_that_differ_are_an_error_before_they_run(rank: int) -> None:
    x = torch.full((16,), float(rank))
    with opened(debug=True) as workspace:
        assert nvls.all_reduce(x, workspace=workspace).tolist() == [1.0] * 16
        with pytest.raises(DivergenceError, match="num_bytes=32"):
            nvls.all_reduce(x[: 8 + 8 * rank], workspace=workspace)
        with pytest.raises(DivergenceError, match="all_gather_into_tensor"):
            (nvls.all_gather_into_tensor if rank else nvls.all_reduce)(x, workspace=workspace)
        assert nvls.all_reduce(x, workspace=workspace).tolist() == [1.0] * 16
    refused(DivergenceError, "max_bytes", opened, 1 << (12 + rank))


@ranks(2)
def test_operations_in_graphs_meet_before_they_write(rank: int) -> None:
    """The host of a CPU captures nothing; the turns are those that a capture would get."""
    from pcomm.nvls.workspace.slots import SlotRing

    class Captured(SlotRing):
        def next(self, *, is_captured: bool) -> Any:
            return super().next(is_captured=True)

    x = torch.full((16,), float(rank))
    with opened() as workspace:
        workspace.turns.rotation = Captured()
        numbers = []
        for step in range(4):
            if step == 2:
                with workspace.sequence():
                    nvls.all_reduce(x, workspace=workspace, algo="p2p")
                    nvls.all_reduce(x, workspace=workspace, algo="multimem")
            view = workspace.empty((16,), torch.float32).copy_(x)
            assert nvls.all_reduce(view, workspace=workspace, algo="p2p").tolist() == [1.0] * 16
            found = nvls.all_gather_into_tensor(x, workspace=workspace, algo="multimem")
            assert found.tolist() == [0.0] * 16 + [1.0] * 16
            numbers.append(int(workspace._epochs[1]))
        # Of block 0: each operation has a barrier, and one more where it does not know the last.
        assert numbers == [4, 8, 15, 19]


@ranks(2)
def test_a_workspace_that_is_dropped_warns_and_one_that_is_closed_does_not(rank: int) -> None:
    before = shared_mappings()
    with open_groups(Topology({"tp": 2}), ["tp"]) as groups:
        emulate()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with nvls.Workspace(groups["tp"], 1 << 12) as workspace:
                pass
            alone = nvls.Workspace(Group("alone", (rank,), None), 1 << 12)  # has no memory
            del workspace, alone
            gc.collect()
        workspace = nvls.Workspace(groups["tp"], 1 << 12)
        with pytest.warns(ResourceWarning, match="was not closed"):
            del workspace
    assert not shared_mappings() - before


@ranks(2)
def test_a_device_may_be_named_and_a_table_be_given(rank: int) -> None:
    from pcomm.nvls.policy import Band, CollectiveRequest, Table, Threshold

    rows = (Threshold("p2p", 1 << 20, 2, 4, "a test"),)
    table = Table((Band(("emulated",), ("all_reduce",), (2, 2), rows), *Table().bands))
    with opened(device="cpu", table=table) as workspace:
        assert "(a test)" in workspace.explain(CollectiveRequest("all_reduce", 4096, torch.float32))
    # On one rank alone: the other one hears of it, and does not wait.
    for wrong, words in (
        ({"device": "no device"}, "device='no device'"),
        ({"table": "none.json"}, "policy.Table"),
        ({"max_bytes": 1 << 60}, "bytes for this rank"),
        ({"timeout_s": None}, "timeout_s=None"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "no CUDA device")]),
    ):
        with pytest.raises(PeerError if rank else ConfigError, match=words):
            opened(**{"max_bytes": 1 << 12, **({} if rank else wrong)})


@ranks(2)
def test_a_forked_process_takes_no_part(rank: int) -> None:
    x = torch.ones(16)
    with opened() as workspace:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                nvls.all_reduce(x, workspace=workspace, algo="p2p")
            except ClosedError as error:
                code = 7 if f"process {os.getppid()}" in error.found else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert nvls.all_reduce(x, workspace=workspace, algo="p2p").tolist() == [2.0] * 16


@ranks(2)
def test_a_rank_that_makes_another_call_is_told_of_debug(rank: int) -> None:
    """Neither of them is at fault where it raises."""
    with opened(timeout_s=0.2) as workspace:
        algo = "lamport" if rank else "p2p"
        with pytest.raises(PeerTimeoutError, match="debug=True"):
            nvls.all_reduce(torch.ones(16), workspace=workspace, algo=algo)
