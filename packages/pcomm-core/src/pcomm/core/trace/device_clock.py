"""Times of work on a GPU, by events on its streams that are read once, at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """Marks places in the current stream of a GPU. It has not run on hardware.

    The host waits for the first mark, to know what time it is there, and for all of them in `wait`;
    between the two it waits for none.

    Args:
        device: The GPU.
        clock: Clock of the host, in seconds, in which the times are given.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.device, self._clock = device, clock
        self._first: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> torch.cuda.Event | None:
        """This place in the current stream; None where the stream is captured and does not run."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._first is None:
            first = self._recorded()
            first.synchronize()
            self._first = first, self._clock()
        return self._recorded()

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Wait until the device has passed all marks."""
        torch.cuda.synchronize(self.device)

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> tuple[float, float]:
        """When the device passed two marks, in seconds of the host's clock, after `wait`. Local."""
        assert self._first is not None, "there are marks"
        first, first_s = self._first
        start_s = first_s + first.elapsed_time(start) / 1e3
        # Not from the first mark: milliseconds in fp32 are rough after a while.
        return start_s, start_s + start.elapsed_time(stop) / 1e3
