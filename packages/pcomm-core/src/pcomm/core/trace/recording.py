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
from pcomm.core.trace.device_clock import DeviceClock
from pcomm.core.trace.events import COMPUTE, WAIT, Event, StopIs, queue_of

__all__ = ["Mark", "Recorder", "TracedCollectives", "gather_events", "traced", "traced_groups"]

Mark = float | torch.cuda.Event
"""A moment: seconds of the host's clock, or a place in a stream of a GPU."""


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
        """Record from the call to its return; on a GPU, to the end of the operation there."""
        sent_bytes, device = call.sent_bytes(self.rank, self.size), call.x.device
        start = self._recorder.mark(device)
        result = self.inner.run(call)
        stop = self._recorder.mark(device)
        self._add(call.operation, sent_bytes, start, stop, _end(device, "done", start, stop), True)
        return result

    def start(self, call: Call) -> Pending:
        """Record from the call to the end of the operation, and the wait."""
        # Not the call itself: it holds tensors.
        name, sent_bytes = call.operation, call.sent_bytes(self.rank, self.size)
        recorder, device = self._recorder, call.x.device
        start_s, start = recorder.clock(), recorder.mark(device)
        pending = self.inner.start(call)
        is_seen = pending.on_done(
            lambda: self._add(name, sent_bytes, start_s, recorder.clock(), "done", False)
        )

        def finish() -> Tensor:
            before = recorder.mark(device)
            result = pending.wait()
            after = recorder.mark(device)
            if not is_seen:
                stop_is = _end(device, "wait", start, after)
                self._add(name, sent_bytes, start, after, stop_is, False)
            self._add(f"wait {name}", 0, before, after, "done", True, WAIT)
            return result

        return pending.around(finish)

    def _add(
        self,
        name: str,
        sent_bytes: int,
        start: Mark,
        stop: Mark,
        stop_is: StopIs,
        blocks: bool,
        queue: str = "",
    ) -> None:
        recorder = self._recorder
        event = Event(
            self._group,
            self._role,
            name,
            sent_bytes,
            0.0,
            0.0,
            recorder.rank,
            queue or self._queue,
            stop_is,
            blocks,
        )
        recorder.add_between(event, start, stop)


def _end(device: torch.device, on_host: StopIs, start: Mark, stop: Mark) -> StopIs:
    is_timed = all(isinstance(mark, torch.cuda.Event) for mark in (start, stop))
    return on_host if device.type == "cpu" or is_timed else "launch"


class Recorder:
    """The events of one rank, in the order in which they ended.

    Several threads may record at once. The default clock is shared by
    all processes of one machine.

    Args:
        rank: Global rank of this process.
        clock: Function that returns a monotonic time in seconds.
        is_on: True to keep events; may be changed at any time.
        device: Device of the computations. Those of a GPU have the times of its streams, which are
            read when the events are asked for, and wait for the device; otherwise they have those
            of the host.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        is_on: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.clock, self.is_on = rank, clock, is_on
        is_gpu = device is not None and device.type == "cuda"
        self._device_clock = DeviceClock(device, clock) if device is not None and is_gpu else None
        # Those on a GPU with the marks between which they are, as long as these are not read.
        self._events: list[Event | tuple[Event, torch.cuda.Event, torch.cuda.Event]] = []
        self._lock = threading.Lock()

    @property
    def events(self) -> tuple[Event, ...]:
        """What was recorded until now; waits for the GPU if there is something on it."""
        with self._lock:
            if any(not isinstance(one, Event) for one in self._events):
                assert self._device_clock is not None, "there are marks"
                self._device_clock.wait()
            found = [one if isinstance(one, Event) else self._read(*one) for one in self._events]
            self._events[:] = found
            return tuple(found)

    def _read(self, event: Event, start: torch.cuda.Event, stop: torch.cuda.Event) -> Event:
        assert self._device_clock is not None, "there are marks"
        start_s, stop_s = self._device_clock.seconds(start, stop)
        return dataclasses.replace(event, start_s=start_s, stop_s=stop_s)

    def add(self, event: Event) -> None:
        """Keep an event, unless `is_on` is false. Local, from any thread."""
        if self.is_on:
            with self._lock:
                self._events.append(event)

    def mark(self, device: torch.device | None = None) -> Mark:
        """This moment: on the GPU of this recorder if it is of that device, else on the host.

        Args:
            device: Device of what is done; None for that of the recorder.
        """
        clock = self._device_clock
        if clock is None or not self.is_on or (device is not None and device != clock.device):
            return self.clock()
        return clock.mark() or self.clock()

    def add_between(self, event: Event, start: Mark, stop: Mark) -> None:
        """Keep an event that lies between two marks, unless `is_on` is false. Local.

        Args:
            event: The event, whose own times do not count.
            start: Mark of its start.
            stop: Mark of its stop. Where one of the two is on the host, both are.
        """
        if not self.is_on:
            return
        on_device = torch.cuda.Event
        if isinstance(start, on_device) and isinstance(stop, on_device):
            with self._lock:
                self._events.append((event, start, stop))
            return
        now = self.clock()
        start_s = now if isinstance(start, on_device) else start
        stop_s = now if isinstance(stop, on_device) else stop
        self.add(dataclasses.replace(event, start_s=start_s, stop_s=stop_s))

    def clear(self) -> None:
        """Forget all events."""
        with self._lock:
            self._events.clear()

    @contextmanager
    def span(self, name: str, queue: str = COMPUTE) -> Iterator[None]:
        """Record the time that the `with` block takes; also one that ends with an error. Local.

        Around work on a GPU that is not the recorder's it is that in which the host hands it over.
        """
        start = self.mark()
        try:
            yield
        finally:
            event = Event("", "", name, 0, 0.0, 0.0, self.rank, queue)
            self.add_between(event, start, self.mark())


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
