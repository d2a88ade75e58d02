"""The order of streams, with described ones: refused, followed, and left alone in a capture."""

from __future__ import annotations

import pytest
import torch

from nvls_support.fake_device import FakeStream
from nvls_support.refusals import refused
from pcomm.core.errors import ConfigError
from pcomm.nvls.workspace.slots import CudaStream, StreamOrder, stream_of


def test_another_stream_is_refused_unless_it_follows() -> None:
    stream = FakeStream()
    order, main, side = StreamOrder(stream), stream.handle, stream.handle + 1
    assert not order.next_is_captured()
    stream.handle = side
    refused(ConfigError, "another stream", order.next_is_captured)
    order.follow()
    assert not order.next_is_captured()
    assert stream.waits == [(side, main)]
    order.follow()
    assert stream.waits == [(side, main)]
    stream.handle = main
    order.follow()
    assert stream.waits == [(side, main), (main, side)]
    # A capture has a stream of its own, which may not wait, and changes nothing.
    stream.handle, stream.captured = side + 1, True
    order.follow()
    assert order.next_is_captured()
    stream.handle, stream.captured = main, False
    assert not order.next_is_captured()
    assert stream.waits == [(side, main), (main, side)]


def test_a_cpu_has_no_streams() -> None:
    order = StreamOrder(stream_of(torch.device("cpu")))
    order.follow()
    assert not order.next_is_captured()


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited_for = handle, list[int]()

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.cuda_stream)


def test_the_stream_of_a_device_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Stream(5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream(handle))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    # Where torch has no shorter way.
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    stream = stream_of(torch.device("cuda"))
    assert isinstance(stream, CudaStream)
    assert stream.current() == 5
    stream.wait_for(9)
    assert current.waited_for == [9]
    assert stream.is_current_device()
    assert not stream_of(torch.device("cuda:0")).is_current_device()
