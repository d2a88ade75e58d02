"""Traces of real gloo ranks: ends are seen as they happen, and rank 0 gets everybody's events."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.core.topology import Topology
from pcomm.core.trace import recording as gathering
from pcomm.core.trace.events import overlap_fraction
from pcomm.core.trace.recording import Recorder, gather_events, traced_groups


def starts(c: Collectives, x: Tensor) -> dict[str, Pending]:
    return {
        "all_gather": c.all_gather_async(x),
        "reduce_scatter": c.reduce_scatter_async(x),
        "all_reduce": c.all_reduce_async(x),
        "all_to_all": c.all_to_all_async(x),
        "broadcast": c.broadcast_async(x, source=1),
    }


@ranks(2)
def test_the_end_of_every_operation_is_seen_without_a_wait(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        for name, pending in starts(groups["dp"].collectives, torch.arange(4.0)).items():
            ended = threading.Event()
            assert pending.on_done(ended.set), name
            assert ended.wait(PATIENCE_S), name
            pending.wait()
            late = threading.Event()
            assert pending.on_done(late.set)
            assert late.is_set()


@ranks(2)
def test_an_operation_ends_when_the_last_rank_has_joined_it(rank: int) -> None:
    recorder = Recorder(rank)
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "control")]) as groups:
        watched = traced_groups(groups, recorder)["dp"].collectives
        control = groups["dp", "control"].collectives
        x = torch.full((4,), rank + 1.0)
        pending = watched.all_reduce_async(x) if rank == 0 else None
        # Read before the other rank is let go: behind the control operation it may have joined.
        joined_s = recorder.clock()
        control.all_reduce(torch.zeros(1))
        pending = pending or watched.all_reduce_async(x)
        assert_equal(pending.wait(), torch.full((4,), 3.0))
        event = recorder.events[0]
        assert (event.operation, event.bytes, event.stop_is) == ("all_reduce", 16, "done")
        if rank == 0:
            assert event.start_s < joined_s <= event.stop_s


@ranks(2)
def test_two_roles_overlap_and_one_role_takes_turns(rank: int) -> None:
    recorder = Recorder(rank)
    specs = ["dp", ("dp", "gather"), ("dp", "control")]
    with open_groups(Topology({"dp": 2}), specs) as groups:
        watched = traced_groups(groups, recorder)
        control = groups["dp", "control"].collectives
        gather, reduce = watched["dp", "gather"].collectives, watched["dp"].collectives
        x = torch.ones(8)
        # Neither can end before both ranks have issued both, so they must overlap on rank 0.
        both = [gather.all_gather_async(x), reduce.all_reduce_async(x)] if rank == 0 else []
        control.all_reduce(torch.zeros(1))
        both = both or [gather.all_gather_async(x), reduce.all_reduce_async(x)]
        for pending in both:
            pending.wait()
        if rank == 0:
            assert overlap_fraction(recorder.events, a="dp:gather", b="dp") > 0.0
        recorder.clear()
        gather.all_gather(x)
        reduce.all_reduce(x)
        assert overlap_fraction(recorder.events, a="dp:gather", b="dp") == 0.0


@ranks(3)
def test_the_first_rank_gets_the_events_of_all(rank: int) -> None:
    recorder = Recorder(rank)
    with open_groups(Topology({"dp": 3}), ["dp", ("dp", "control")]) as groups:
        watched = traced_groups(groups, recorder)["dp"].collectives
        for _ in range(3):
            watched.all_gather(torch.zeros(3))
        mine = recorder.events
        events = gather_events(recorder, groups["dp", "control"].collectives)
    if rank:
        assert events == []
        return
    assert [e for e in events if e.rank == 0] == list(mine)
    assert [sum(e.rank == r for e in events) for r in range(3)] == [3, 3, 3]
    assert {e.bytes for e in events} == {24}


@ranks(2)
def test_another_machine_is_shifted_to_the_first_ones_clock(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering.socket, "gethostname", lambda: f"host{rank}")
        # Two machines whose clocks began at other times.
        recorder = Recorder(rank, clock=lambda: 1000.0 * (rank + 1))
        with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
            with recorder.span("forward"):
                pass
            events = gather_events(recorder, groups["dp"].collectives)
    if rank == 0:
        assert [(e.rank, e.start_s) for e in events] == [(0, 1000.0), (1, 1000.0)]
