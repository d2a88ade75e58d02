"""The order of streams, with described ones: refused, followed, and left alone in a capture."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.errors import ConfigError
from pcomm.nvls.workspace.stream_order import StreamOrder


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited_for = number, list[int]()

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.cuda_stream)


def test_another_stream_is_refused_unless_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    current, is_capturing = [Stream(0)], [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    order, main, side = StreamOrder(torch.device("cuda")), current[0], Stream(7)
    assert not order.next_is_captured()
    current[0] = side
    with pytest.raises(ConfigError, match="another stream"):
        order.next_is_captured()
    order.follow()
    assert not order.next_is_captured()
    assert (side.waited_for, main.waited_for) == ([0], [])
    order.follow()
    assert side.waited_for == [0]
    # Back again, by another object for the same stream.
    current[0] = main = Stream(0)
    order.follow()
    assert main.waited_for == [7]
    # A capture has a stream of its own, which may not wait, and changes nothing.
    current[0] = capture = Stream(9)
    is_capturing[0] = True
    order.follow()
    assert order.next_is_captured()
    assert capture.waited_for == []
    current[0], is_capturing[0] = main, False
    assert not order.next_is_captured()
    assert main.waited_for == [7]


def test_a_cpu_has_no_streams() -> None:
    order = StreamOrder(torch.device("cpu"))
    order.follow()
    assert not order.next_is_captured()
