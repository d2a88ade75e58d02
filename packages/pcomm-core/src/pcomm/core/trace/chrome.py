"""Events as a file for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The format is the JSON of Chrome's trace viewer: a process is a rank, a thread is a queue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pcomm.core.trace.event import COMPUTE, WAIT, Event

__all__ = ["chrome_trace", "write_chrome_trace"]


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
