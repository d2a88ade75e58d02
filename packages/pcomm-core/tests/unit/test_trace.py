"""Events of collectives with a clock that the test turns, their overlap, and Chrome traces."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcomm.core.collectives.autograd import DifferentiableCollectives
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.core.trace.events import (
    Event,
    chrome_trace,
    exposed_communication_s,
    intersection,
    overlap_fraction,
    subtraction,
    total_s,
    union,
    write_chrome_trace,
)
from pcomm.core.trace.recording import Recorder, traced, traced_groups


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowWork:
    """What torch's handle does for `Pending`: the test says when the operation ends."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[object], None]] = []

    def get_future(self) -> SlowWork:
        return self

    def add_done_callback(self, call: Callable[[object], None]) -> None:
        self.callbacks.append(call)

    def end(self) -> None:
        for call in self.callbacks:
            call(self)


class SlowCollectives(IdentityCollectives):
    """A group of one whose gathers take as long as the test wants."""

    def __init__(self, clock: Clock, *, is_seen: bool) -> None:
        self.clock, self.is_seen, self.work = clock, is_seen, SlowWork()

    def start(self, call: Call) -> Pending:
        x = call.x

        def finish() -> Tensor:
            self.clock.now_s = max(self.clock.now_s, 9.0)
            return x

        return Pending(finish, self.work if self.is_seen else None)  # type: ignore[arg-type]

    def run(self, call: Call) -> Tensor:
        self.clock.now_s += 2.0
        return call.x


X = torch.arange(6.0)


def test_a_blocking_call_is_an_event_from_call_to_return() -> None:
    clock = Clock()
    recorder = Recorder(3, clock=clock)
    clock.now_s = 1.0
    slow = SlowCollectives(clock, is_seen=True)
    assert traced(slow, recorder, group="dp", role="reduce").all_reduce(X) is X
    assert recorder.events == (
        Event("dp", "reduce", "all_reduce", 0, 1.0, 3.0, 3, "dp:reduce", "done", True),
    )


def test_an_operation_ends_when_it_has_ended_and_not_when_it_is_waited_for() -> None:
    clock = Clock()
    recorder, slow = Recorder(clock=clock), SlowCollectives(clock, is_seen=True)
    pending = traced(slow, recorder, group="dp", role="gather").all_gather_async(X)
    clock.now_s = 4.0
    slow.work.end()
    gather = Event("dp", "gather", "all_gather", 0, 0.0, 4.0, 0, "dp:gather")
    assert recorder.events == (gather,)
    clock.now_s = 8.0
    assert pending.wait() is X
    wait = Event("dp", "gather", "wait all_gather", 0, 8.0, 9.0, 0, "wait", "done", True)
    assert recorder.events == (gather, wait)
    assert pending.wait() is X
    assert recorder.events == (gather, wait)


@pytest.mark.parametrize("is_seen", [True, False])
def test_two_recorders_above_each_other_see_the_same(is_seen: bool) -> None:
    clock = Clock()
    slow = SlowCollectives(clock, is_seen=is_seen)
    recorders = [Recorder(clock=clock), Recorder(clock=clock)]
    below = traced(slow, recorders[0], group="dp")
    pending = traced(below, recorders[1], group="dp").all_gather_async(X)
    clock.now_s = 4.0
    slow.work.end()
    pending.wait()
    gathers = [e for recorder in recorders for e in recorder.events if e.queue == "dp"]
    assert {(e.stop_s, e.stop_is) for e in gathers} == {(4.0, "done") if is_seen else (9.0, "wait")}
    recorder = Recorder()
    alone = traced(IdentityCollectives(), recorder, group="dp")
    traced(alone, recorder, group="dp").all_gather_async(X).wait()
    assert [e.stop_is for e in recorder.events if e.queue == "dp"] == ["done", "done"]


def test_an_end_that_cannot_be_seen_is_the_wait_and_says_so() -> None:
    clock = Clock()
    recorder, slow = Recorder(clock=clock), SlowCollectives(clock, is_seen=False)
    pending = traced(slow, recorder, group="dp").all_gather_async(X)
    assert recorder.events == ()
    clock.now_s = 8.0
    pending.wait()
    gather, wait = recorder.events
    assert gather == Event("dp", "", "all_gather", 0, 0.0, 9.0, 0, "dp", "wait")
    assert (wait.start_s, wait.stop_s, wait.blocks) == (8.0, 9.0, True)


def every_operation(c: Collectives) -> list[Tensor]:
    """One call of each operation, blocking and not; the first three with uneven sizes too."""
    x, sizes = torch.arange(6.0) + c.rank, [1, 2, 3]
    mine = x[: sizes[c.rank]]
    sent = {"send_sizes": [sizes[c.rank]] * 3, "receive_sizes": sizes}
    block = torch.arange(3.0 * sizes[c.rank])
    return [
        c.all_gather(x),
        c.all_gather_async(mine, sizes=sizes).wait(),
        c.reduce_scatter(x),
        c.reduce_scatter_async(x, sizes=sizes).wait(),
        c.all_reduce(x, op="max"),
        c.all_reduce_async(x).wait(),
        c.all_to_all(block, **sent),
        c.all_to_all_async(x).wait(),
        c.broadcast(x, source=1),
        c.broadcast_async(x, source=2).wait(),
    ]


def test_results_and_bytes_are_those_of_untraced_calls() -> None:
    recorders = [Recorder(rank) for rank in range(3)]

    def run(c: VirtualCollectives) -> tuple[list[Tensor], list[Tensor], list[tuple[str, int]]]:
        spy = SpyCollectives(c)
        plain = every_operation(spy)
        through = every_operation(traced(c, recorders[c.rank], group="dp"))
        return plain, through, [(call.operation, call.sent_bytes) for call in spy.calls]

    for recorder, (plain, through, calls) in zip(recorders, run_virtual(run, 3), strict=True):
        for a, b in zip(plain, through, strict=True):
            assert_equal(a, b)
        moved = [e for e in recorder.events if e.is_communication]
        assert [(e.operation, e.bytes) for e in moved] == calls
        assert {e.rank for e in recorder.events} == {recorder.rank}
        assert all(e.start_s <= e.stop_s for e in recorder.events)


def test_backward_is_recorded_under_differentiable_collectives() -> None:
    recorders = [Recorder(rank) for rank in range(2)]

    def run(c: VirtualCollectives) -> None:
        x = torch.ones(2, requires_grad=True)
        below = traced(c, recorders[c.rank], group="cp")
        DifferentiableCollectives(below).all_gather(x).sum().backward()

    run_virtual(run, 2)
    assert [e.operation for e in recorders[0].events] == ["all_gather", "reduce_scatter"]


def test_spans_nest_and_survive_errors() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)

    def fail() -> None:
        with recorder.span("step"), recorder.span("forward"):
            clock.now_s = 2.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [(e.operation, e.start_s, e.stop_s, e.queue) for e in recorder.events] == [
        ("forward", 0.0, 2.0, "compute"),
        ("step", 0.0, 2.0, "compute"),
    ]


def test_a_recorder_that_is_off_keeps_nothing() -> None:
    recorder = Recorder()
    recorder.is_on = False
    with recorder.span("forward"):
        pass
    assert recorder.events == ()
    recorder.is_on = True
    with recorder.span("forward"):
        pass
    assert len(recorder.events) == 1
    recorder.clear()
    assert recorder.events == ()


def test_threads_record_at_once() -> None:
    recorder = Recorder()

    def record() -> None:
        for _ in range(500):
            with recorder.span("work"):
                pass

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.events) == 2000


def test_groups_are_traced_together_and_closed_once() -> None:
    closed: list[str] = []
    groups = Groups([Group("tp", (0,), None), Group("dp", (0,), None, role="gather")])
    groups.before_close(lambda: closed.append("first"))
    recorder = Recorder()
    watched = traced_groups(groups, recorder)
    watched.before_close(lambda: closed.append("second"))
    watched["tp"].collectives.all_reduce(X)
    watched["dp", "gather"].differentiable.all_gather(X)
    assert [(e.queue, e.operation) for e in recorder.events] == [
        ("tp", "all_reduce"),
        ("dp:gather", "all_gather"),
    ]
    assert groups["tp"].collectives is not watched["tp"].collectives
    watched.close()
    groups.close()
    assert closed == ["second", "first"]


INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple))


def ticks(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit steps that intervals with whole ends cover."""
    return {tick for start, stop in intervals for tick in range(int(start), int(stop))}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_ticks(a: Any, b: Any) -> None:
    assert ticks(intersection(a, b)) == ticks(a) & ticks(b)
    assert ticks(subtraction(a, b)) == ticks(a) - ticks(b)
    assert ticks(union(a)) == ticks(a)
    assert total_s(a) == len(ticks(a))
    for result in (union(a), intersection(a, b), subtraction(a, b)):
        assert all(start < stop for start, stop in result)
        assert all(x[1] <= y[0] for x, y in itertools.pairwise(result))


def event(queue: str, start: float, stop: float, *, rank: int = 0, blocks: bool = False) -> Event:
    group, _, role = queue.partition(":")
    group = group if group in ("dp", "tp") else ""
    return Event(group, role, queue, 8, start, stop, rank, queue, blocks=blocks)


def test_overlap_is_the_share_of_the_shorter_queue() -> None:
    events = [event("dp:gather", 0, 4), event("dp:reduce", 3, 5), event("dp:reduce", 8, 10)]
    assert overlap_fraction(events, a="dp:gather", b="dp:reduce") == 0.25
    assert overlap_fraction(events, a="dp:reduce", b="dp:gather") == 0.25
    # What other ranks do at that time does not count.
    apart = [event("dp:gather", 0, 4), event("dp:reduce", 0, 4, rank=1)]
    assert overlap_fraction(apart, a="dp:gather", b="dp:reduce") == 0.0


def test_a_queue_that_never_was_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'dp:gather'"):
        overlap_fraction([event("dp:gather", 0, 4)], a="dp:gathr", b="dp:gather")


def test_communication_is_exposed_where_the_rank_does_not_compute() -> None:
    events = [
        event("steps", 0, 20),  # neither computing nor communication
        event("compute", 0, 10),
        event("dp:gather", 2, 8),  # behind computing
        event("wait", 6, 8, blocks=True),  # but for its last 2 s, waited for within the span
        event("tp", 9, 10, blocks=True),  # a blocking one within the span: 1 s
        event("dp:reduce", 9, 12),  # ends after it: 2 s more, and 1 s beside the blocking one
    ]
    assert exposed_communication_s(events) == 5.0
    assert exposed_communication_s([*events, event("compute", 0, 1, rank=1)]) == 2.5
    assert exposed_communication_s([]) == 0.0


EVENTS = st.builds(
    lambda queue, rank, ends: event(queue, *sorted(ends), rank=rank),
    st.sampled_from(["compute", "wait", "dp", "dp:gather"]),
    st.integers(0, 2),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)


@given(st.lists(EVENTS))
def test_slices_of_a_thread_follow_or_contain_each_other(events: list[Event]) -> None:
    trace = chrome_trace(events)
    slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    begin = min((e.start_s for e in events), default=0)
    assert sorted((s["pid"], s["name"], s["ts"] / 1e6, s["dur"] / 1e6) for s in slices) == sorted(
        (e.rank, e.queue, e.start_s - begin, e.stop_s - e.start_s) for e in events
    )
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for s in slices:
        threads.setdefault((s["pid"], s["tid"]), []).append((s["ts"], s["ts"] + s["dur"]))
    for mine in threads.values():
        for i, (start, stop) in enumerate(mine):
            for other_start, other_stop in mine[i + 1 :]:
                assert other_start >= stop or (start <= other_start and other_stop <= stop)


def test_a_process_is_a_rank_and_a_thread_a_queue() -> None:
    trace = chrome_trace(
        [event("dp", 1, 3, rank=1), event("dp", 2, 4, rank=1), event("compute", 1, 2, rank=0)]
    )
    names = [
        (e["pid"], e["tid"], e["args"]["name"])
        for e in trace["traceEvents"]
        if e["name"] in ("process_name", "thread_name")
    ]
    assert names == [
        (0, 0, "rank 0"),
        (0, 0, "compute"),
        (1, 0, "rank 1"),
        (1, 0, "dp"),
        (1, 1, "dp (2)"),
    ]
    first = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1)
    assert (first["ts"], first["dur"], first["args"]["bytes"]) == (0.0, 2e6, 8)


def test_what_begins_with_what_contains_it_stays_in_its_row() -> None:
    trace = chrome_trace([event("compute", 0, 1), event("compute", 0, 4), event("compute", 1, 4)])
    assert {entry["tid"] for entry in trace["traceEvents"]} == {0}


def test_the_file_is_json_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "made" / "trace.json"
    write_chrome_trace(path, [event("dp", 0, 1)])
    write_chrome_trace(path, [event("dp", 0, 1), event("compute", 0, 1)])
    assert json.loads(path.read_text()) == chrome_trace([event("dp", 0, 1), event("compute", 0, 1)])
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]
