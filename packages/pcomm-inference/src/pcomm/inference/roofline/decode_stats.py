"""How near the steps of decoding of an engine are to the limit of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.inference.roofline.bandwidth import MemoryBandwidth
from pcomm.inference.roofline.limit import floor_ms, ratio
from pcomm.inference.roofline.step_bytes import StepBytes

__all__ = ["DecodeStats"]


@dataclass(frozen=True)
class DecodeStats:
    """Steps in which every request got its next token, and nothing of a prompt was computed.

    What is said of a step is of the last 256 of them: the median time, and the bytes of the one
    with the median number of bytes. All numbers are of this rank.

    Attributes:
        steps: Number of such steps so far.
        mean_ms: Mean milliseconds of all of them, from scheduling to outputs.
        step_ms: Median milliseconds of the last ones.
        num_requests: Number of requests of the step whose bytes are counted.
        moved: Bytes that this step had to read and write.
        is_upper_bound: True where `moved` counts experts as if no two tokens met the same one.
        bandwidth: Bandwidth of the memory of the device.
    """

    steps: int
    mean_ms: float
    step_ms: float
    num_requests: int
    moved: StepBytes
    is_upper_bound: bool
    bandwidth: MemoryBandwidth

    @property
    def floor_ms(self) -> float:
        """Milliseconds that the memory needs for `moved`, at the largest bandwidth."""
        return floor_ms(self.moved.total, self.bandwidth.largest)

    @property
    def ratio(self) -> float:
        """`floor_ms` by `step_ms`: 1 for steps that do nothing but wait for the memory."""
        return ratio(self.floor_ms, self.step_ms)

    def __str__(self) -> str:
        most = "at most " if self.is_upper_bound else ""
        size = _short(self.moved.total, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))
        speed = _short(self.bandwidth.largest, (("GB/s", 1e9), ("MB/s", 1e6)))
        return (
            f"a decode step {_time(self.step_ms)}, floor {_time(self.floor_ms)} "
            f"({most}{size} at {speed}), ratio {self.ratio:.2g}"
        )


def _time(milliseconds: float) -> str:
    return _short(milliseconds, (("s", 1e3), ("ms", 1), ("us", 1e-3)))


def _short(number: float, units: Sequence[tuple[str, float]]) -> str:
    """Three digits, in the largest unit that gives at least 1, or else in the smallest."""
    unit, size = next((one for one in units if number >= one[1]), units[-1])
    scaled = number / size
    return f"{scaled:.3g} {unit}" if scaled < 999 else f"{scaled:.0f} {unit}"
