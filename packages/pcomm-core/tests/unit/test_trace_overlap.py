"""Interval arithmetic against counting ticks, and Chrome traces against the format's rules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
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
