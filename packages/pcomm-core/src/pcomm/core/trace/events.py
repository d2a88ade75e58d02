"""Events of communication and computation: how much of them overlaps, and a file for Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pcomm.core.errors import ConfigError, near_misses

__all__ = [
    "COMPUTE",
    "WAIT",
    "Event",
    "Interval",
    "StopIs",
    "chrome_trace",
    "exposed_communication_s",
    "intersection",
    "overlap_fraction",
    "queue_of",
    "subtraction",
    "total_s",
    "union",
    "write_chrome_trace",
]


StopIs = Literal["done", "wait", "launch"]

COMPUTE = "compute"
"""The queue of the computations of a rank."""

WAIT = "wait"
"""The queue of the waits of a rank for asynchronous operations."""


@dataclass(frozen=True)
class Event:
    """A collective, a wait for one, or a computation.

    Args:
        group: Name of the group; empty for a computation.
        role: Role of the group.
        operation: Name of the collective or of the computation.
        bytes: Least number of bytes that this rank had to send for it.
        start_s: Time at which it was issued, in seconds of the clock of its rank.
        stop_s: Time at which it ended, with the meaning given by `stop_is`.
        rank: Global rank on which it happened.
        queue: `"compute"`, `"wait"`, the communicator as `"dp:gather"`, or a name of your own.
        stop_is: Meaning of `stop_s`. `"done"`: the operation had ended. `"wait"`: its end cannot
            be seen, and this is the time at which a wait for it returned. `"launch"`: it runs on
            a device, and this is the time at which the host had queued it.
        blocks: True if the program stood still from start to stop.
    """

    group: str
    role: str
    operation: str
    bytes: int
    start_s: float
    stop_s: float
    rank: int
    queue: str
    stop_is: StopIs = "done"
    blocks: bool = False

    @property
    def seconds(self) -> float:
        """Duration, in seconds."""
        return self.stop_s - self.start_s

    @property
    def is_communication(self) -> bool:
        """Whether it is a collective in flight, and not a computation or a wait."""
        return bool(self.group) and self.queue != WAIT


def queue_of(group: str, role: str) -> str:
    """The name of the queue of a group: `dp:gather`, or `dp` without a role."""
    return f"{group}:{role}" if role else group


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as disjoint intervals, in order; empty ones fall out."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points of time in both, as disjoint intervals in order."""
    left, right = union(a), union(b)
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            both.append((start, stop))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtraction(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points of time in `a` and not in `b`, as disjoint intervals in order."""
    whole, holes = union(a), union(b)
    edges = [-float("inf"), *(edge for hole in holes for edge in hole), float("inf")]
    return intersection(whole, zip(edges[::2], edges[1::2], strict=True))


def total_s(intervals: Iterable[Interval]) -> float:
    """Length of all together; time that is in several counts once."""
    return sum(stop - start for start, stop in union(intervals))


def overlap_fraction(events: Sequence[Event], *, a: str, b: str) -> float:
    """The share of the shorter of two queues' busy time in which both are busy.

    1 says that the shorter one is hidden behind the other, 0 that they take turns. Over several
    ranks both times are summed. 0 where one of the queues was never busy.

    Args:
        events: Events of one rank or several.
        a: Name of a queue, such as `"dp:gather"`.
        b: Name of another queue.

    Raises:
        ConfigError: No event has such a queue.
    """
    _check_known(events, a, b)
    both = shorter = 0.0
    for mine in _by_rank(events):
        in_a = _intervals(event for event in mine if event.queue == a)
        in_b = _intervals(event for event in mine if event.queue == b)
        both += total_s(intersection(in_a, in_b))
        shorter += min(total_s(in_a), total_s(in_b))
    return both / shorter if shorter else 0.0


def exposed_communication_s(events: Sequence[Event]) -> float:
    """Seconds in which a collective was in flight and the rank did not compute.

    A rank computes in its spans of `"compute"`, but not while it stands still in a blocking
    collective or in a wait. With the events of several ranks this is their mean.
    """
    per_rank = []
    for mine in _by_rank(events):
        moving = _intervals(event for event in mine if event.is_communication)
        spans = _intervals(event for event in mine if event.queue == COMPUTE)
        still = _intervals(event for event in mine if event.blocks)
        per_rank.append(total_s(subtraction(moving, subtraction(spans, still))))
    return sum(per_rank) / len(per_rank) if per_rank else 0.0


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return [(event.start_s, event.stop_s) for event in events]


def _by_rank(events: Sequence[Event]) -> list[list[Event]]:
    ranks: dict[int, list[Event]] = {}
    for event in events:
        ranks.setdefault(event.rank, []).append(event)
    return list(ranks.values())


def _check_known(events: Sequence[Event], *queues: str) -> None:
    known = {event.queue for event in events}
    for queue in queues:
        if queue not in known:
            raise ConfigError(
                f"overlap_fraction: queue {queue!r}",
                found=f"{len(events)} events",
                why="A queue without an event is more often misspelt than idle.",
                fix=near_misses(queue, known),
            )


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The events of any number of ranks as Chrome's trace object; times start at 0. Local.

    A thread of that format holds slices that follow or contain each other. Operations of one
    queue that run at the same time therefore get a row each: `dp`, `dp (2)`.
    """
    # The longer of two that start together is the outer one.
    ordered = sorted(events, key=lambda event: (event.start_s, -event.stop_s))
    begin_s = ordered[0].start_s if ordered else 0.0
    queues = sorted({event.queue for event in ordered}, key=_place)
    entries: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in ordered}):
        entries.append(_name("process_name", rank, 0, f"rank {rank}"))
        entries.append(_order("process_sort_index", rank, 0, rank))
        thread = 0
        for queue in queues:
            mine = [event for event in ordered if event.rank == rank and event.queue == queue]
            for number, row in enumerate(_rows(mine), 1):
                name = queue if number == 1 else f"{queue} ({number})"
                entries.append(_name("thread_name", rank, thread, name))
                entries.append(_order("thread_sort_index", rank, thread, thread))
                entries += [_slice(event, thread, begin_s) for event in row]
                thread += 1
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, events: Iterable[Event]) -> None:
    """Write `chrome_trace(events)`; a file that is there is replaced when the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(chrome_trace(events), separators=(",", ":")))
    os.replace(partial, path)


def _rows(events: Sequence[Event]) -> list[list[Event]]:
    """Events by start, dealt to as few rows as hold them without a crossing that does not nest."""
    rows: list[list[Event]] = []
    open_until: list[list[float]] = []
    for event in events:
        number = next((i for i, stops in enumerate(open_until) if _fits(event, stops)), len(rows))
        if number == len(rows):
            rows.append([])
            open_until.append([])
        rows[number].append(event)
        open_until[number].append(event.stop_s)
    return rows


def _fits(event: Event, stops: list[float]) -> bool:
    """Whether it follows or lies within what is open; `stops` loses what has ended before it."""
    while stops and stops[-1] <= event.start_s:
        stops.pop()
    return not stops or event.stop_s <= stops[-1]


def _slice(event: Event, thread: int, begin_s: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"stop is": event.stop_is}
    if event.is_communication:
        arguments |= {"group": event.group, "role": event.role, "bytes": event.bytes}
        if event.seconds > 0:
            arguments["sent GB/s"] = event.bytes / event.seconds / 1e9
    return {
        "ph": "X",
        "name": event.operation,
        "cat": "communication" if event.is_communication else event.queue,
        "pid": event.rank,
        "tid": thread,
        "ts": (event.start_s - begin_s) * 1e6,
        "dur": event.seconds * 1e6,
        "args": arguments,
    }


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _order(kind: str, rank: int, thread: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"sort_index": index}}


def _place(queue: str) -> tuple[int, str]:
    """Computing on top, waits beneath it, then communicators by name."""
    return {COMPUTE: 0, WAIT: 1}.get(queue, 2), queue
