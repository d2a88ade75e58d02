"""The events of all ranks brought together on the first one."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Sequence

import torch

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.trace.event import Event
from pcomm.core.trace.recorder import Recorder

__all__ = ["gather_events"]


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
