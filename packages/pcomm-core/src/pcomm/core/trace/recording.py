"""Collectives recorded as events, and the events of all ranks at rank 0."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.groups.open_groups import Groups
from pcomm.core.trace.events import COMPUTE, WAIT, Event, StopIs, queue_of

__all__ = ["Recorder", "TracedCollectives", "gather_events", "traced", "traced_groups"]


def traced_groups(groups: Groups, recorder: Recorder) -> Groups:
    """`groups` of which every call is recorded, also backward's. Local.

    Both use the same communicators; closing one closes those of the other too.
    """
    return groups.with_collectives(
        lambda group: traced(group.collectives, recorder, group=group.name, role=group.role)
    )


def traced(
    collectives: Collectives, recorder: Recorder, *, group: str, role: str = ""
) -> Collectives:
    """`collectives` that do the same and record every call. Local.

    Put them under the differentiable ones, to see backward too; `traced_groups` does. Whether an
    event is kept is decided when it ends, by `recorder.is_on`.

    Args:
        collectives: Collectives that move the tensors.
        recorder: Recorder that the events are added to.
        group: Name of the group in events.
        role: Role of the group in events.
    """
    return TracedCollectives(collectives, recorder, group=group, role=role)


class TracedCollectives(InstrumentedCollectives):
    """The collectives that `traced` returns.

    An event starts when its operation is issued and stops when that has ended, also where it is
    waited for later. On gloo torch tells when that is. Where the end cannot be seen, the event
    stops at the wait, and says so. A wait is an event of its own, in the queue `"wait"`; on gloo
    that of a reduce-scatter includes its local sum.
    """

    def __init__(
        self, inner: Collectives, recorder: Recorder, *, group: str, role: str = ""
    ) -> None:
        super().__init__(inner)
        self._recorder, self._group, self._role = recorder, group, role
        self._queue = queue_of(group, role)

    def run(self, call: Call) -> Tensor:
        """Record from the call to its return."""
        sent_bytes = call.sent_bytes(self.rank, self.size)
        start_s = self._recorder.clock()
        result = self.inner.run(call)
        self._add(call.operation, sent_bytes, start_s, _end(call.x, "done"), True)
        return result

    def start(self, call: Call) -> Pending:
        """Record from the call to the end of the operation, and the wait."""
        # Not the call itself: it holds tensors.
        name, sent_bytes = call.operation, call.sent_bytes(self.rank, self.size)
        start_s = self._recorder.clock()
        pending = self.inner.start(call)
        is_seen = pending.on_done(lambda: self._add(name, sent_bytes, start_s, "done", False))
        stop_is = _end(call.x, "wait")

        def finish() -> Tensor:
            wait_s = self._recorder.clock()
            result = pending.wait()
            if not is_seen:
                self._add(name, sent_bytes, start_s, stop_is, False)
            self._add(f"wait {name}", 0, wait_s, "done", True, WAIT)
            return result

        return pending.around(finish)

    def _add(
        self,
        name: str,
        sent_bytes: int,
        start_s: float,
        stop_is: StopIs,
        blocks: bool,
        queue: str = "",
    ) -> None:
        recorder = self._recorder
        recorder.add(
            Event(
                self._group,
                self._role,
                name,
                sent_bytes,
                start_s,
                recorder.clock(),
                recorder.rank,
                queue or self._queue,
                stop_is,
                blocks,
            )
        )


def _end(x: Tensor, on_host: StopIs) -> StopIs:
    return on_host if x.device.type == "cpu" else "launch"


class Recorder:
    """The events of one rank, in the order in which they ended.

    Several threads may record at once. The default clock is shared by
    all processes of one machine.

    Args:
        rank: Global rank of this process.
        clock: Function that returns a monotonic time in seconds.
        is_on: True to keep events; may be changed at any time.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        is_on: bool = True,
    ) -> None:
        self.rank, self.clock, self.is_on = rank, clock, is_on
        self._events: list[Event] = []
        self._lock = threading.Lock()

    @property
    def events(self) -> tuple[Event, ...]:
        """What was recorded until now."""
        with self._lock:
            return tuple(self._events)

    def add(self, event: Event) -> None:
        """Keep an event, unless `is_on` is false. Local, from any thread."""
        if self.is_on:
            with self._lock:
                self._events.append(event)

    def clear(self) -> None:
        """Forget all events."""
        with self._lock:
            self._events.clear()

    @contextmanager
    def span(self, name: str, queue: str = COMPUTE) -> Iterator[None]:
        """Record the time that the `with` block takes; also one that ends with an error. Local.

        Around work on a GPU this is the time in which the host hands it over.
        """
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(Event("", "", name, 0, start_s, self.clock(), self.rank, queue))


def gather_events(recorder: Recorder, control: Collectives) -> list[Event]:
    """The events of every rank on the first one of the group; on the others none. Collective.

    Ranks on one machine share a clock. Those on another machine read theirs after a collective
    that ends on all ranks at about the same time, and their events are shifted by the difference;
    so between machines times are exact to the duration of that collective, some tenths of a
    millisecond.

    Args:
        recorder: Recorder of this rank.
        control: Collectives of a group of all ranks on the CPU, apart from the traced ones.
    """
    control.all_reduce(torch.zeros(1))
    record = {
        "host": socket.gethostname(),
        "now_s": recorder.clock(),
        "events": [list(dataclasses.astuple(event)) for event in recorder.events],
    }
    data = torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)
    lengths = control.all_gather(torch.tensor([data.numel()])).tolist()
    is_first = control.rank == 0
    received = control.all_to_all(
        data,
        send_sizes=[data.numel()] + [0] * (control.size - 1),
        receive_sizes=lengths if is_first else [0] * control.size,
    )
    if not is_first:
        return []
    records = [json.loads(bytes(part.tolist())) for part in received.split(lengths)]
    return [event for each in records for event in _shifted(each, records[0])]


def _shifted(record: dict[str, object], first: dict[str, object]) -> Sequence[Event]:
    events = record["events"]
    assert isinstance(events, list)
    restored = [Event(*fields) for fields in events]
    if record["host"] == first["host"]:
        return restored
    ours, theirs = first["now_s"], record["now_s"]
    assert isinstance(ours, float)
    assert isinstance(theirs, float)
    shift_s = ours - theirs
    return [
        dataclasses.replace(e, start_s=e.start_s + shift_s, stop_s=e.stop_s + shift_s)
        for e in restored
    ]
