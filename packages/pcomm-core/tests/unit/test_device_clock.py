"""Times of work on a GPU, with stand-ins of its events: what is marked, and when it is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Call, Pending
from pcomm.core.trace.events import Event
from pcomm.core.trace.recording import Recorder, traced

GPU = torch.device("cuda:0")


class Gpu:
    """A device that is ten seconds behind the host, and an operation of three seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_s, self.device_s = 100.0, 0.0
        self.waits: list[str] = []
        self.is_capturing = False
        gpu = self

        class StandIn:
            """In the place of torch's event; it has the time of its stream there."""

            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                assert stream == "the stream of cuda:0"
                self.ms = gpu.device_s * 1e3

            def synchronize(self) -> None:
                gpu.waits.append("first mark")

            def elapsed_time(self, other: Any) -> float:
                assert gpu.waits[-1] == "device", "read before the device had come to it"
                return float(other.ms - self.ms)

        monkeypatch.setattr(torch.cuda, "Event", StandIn)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda d: f"the stream of {d}")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda d: self.waits.append("device"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def clock(self) -> float:
        self.host_s += 0.001
        return self.host_s


class OnGpu(IdentityCollectives):
    """Operations that take three seconds of the device and none of the host."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def run(self, call: Call) -> Tensor:
        self.gpu.device_s += 3.0
        return call.x

    def start(self, call: Call) -> Pending:
        x, end_s = call.x, self.gpu.device_s + 3.0

        def finish() -> Tensor:
            self.gpu.device_s = max(self.gpu.device_s, end_s)
            return x

        return Pending(finish)


def tensor(device: torch.device) -> Any:
    return SimpleNamespace(device=device, nbytes=4, shape=(1,), dim=lambda: 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def times(events: tuple[Event, ...]) -> list[tuple[str, float, float, str]]:
    """From the host's time of the first mark, which was when the device was at 0."""
    first = 100.001
    return [
        (e.operation, round(e.start_s - first, 6), round(e.stop_s - first, 6), e.stop_is)
        for e in events
    ]


def test_events_have_the_times_of_the_device_and_are_read_once_at_the_end(gpu: Gpu) -> None:
    recorder = Recorder(clock=gpu.clock, device=GPU)
    collectives = traced(OnGpu(gpu), recorder, group="dp")
    with recorder.span("forward"):
        gpu.device_s += 2.0
    collectives.run(Call("all_reduce", tensor(GPU)))
    pending = collectives.start(Call("all_gather", tensor(GPU)))
    with recorder.span("backward"):
        gpu.device_s += 1.0
    pending.wait()
    assert gpu.waits == ["first mark"]
    expected = [
        ("forward", 0.0, 2.0, "done"),
        ("all_reduce", 2.0, 5.0, "done"),
        ("backward", 5.0, 6.0, "done"),
        # Where the stream is behind the wait; the operation may have ended before.
        ("all_gather", 5.0, 8.0, "wait"),
        # What the stream stood still.
        ("wait all_gather", 6.0, 8.0, "done"),
    ]
    assert times(recorder.events) == expected
    assert times(recorder.events) == expected
    assert gpu.waits == ["first mark", "device"]


def test_what_is_not_on_that_device_has_the_times_of_the_host(gpu: Gpu) -> None:
    recorder = Recorder(clock=gpu.clock, device=GPU)
    collectives = traced(OnGpu(gpu), recorder, group="control")
    collectives.run(Call("all_reduce", tensor(torch.device("cpu"))))
    collectives.run(Call("all_reduce", tensor(torch.device("cuda:1"))))
    assert [e.stop_is for e in recorder.events] == ["done", "launch"]
    assert all(0 < e.seconds < 0.01 for e in recorder.events)
    assert gpu.waits == []


def test_what_is_captured_has_no_times_of_its_own(gpu: Gpu) -> None:
    recorder = Recorder(clock=gpu.clock, device=GPU)
    collectives = traced(OnGpu(gpu), recorder, group="dp")
    gpu.is_capturing = True
    collectives.run(Call("all_reduce", tensor(GPU)))
    with recorder.span("forward"):
        gpu.is_capturing = False
    (captured, half) = recorder.events
    assert (captured.stop_is, captured.seconds < 0.01) == ("launch", True)
    assert half.seconds < 0.01


def test_nothing_is_marked_while_it_is_off(gpu: Gpu) -> None:
    recorder = Recorder(clock=gpu.clock, device=GPU, is_on=False)
    with recorder.span("forward"):
        pass
    traced(OnGpu(gpu), recorder, group="dp").run(Call("all_reduce", tensor(GPU)))
    assert (recorder.events, gpu.waits) == ((), [])


def test_without_a_gpu_there_is_no_other_clock() -> None:
    recorder = Recorder(clock=lambda: 1.0, device=torch.device("cpu"))
    assert recorder.mark() == 1.0
