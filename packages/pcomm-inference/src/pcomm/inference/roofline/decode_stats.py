"""How near the steps of decoding of an engine are to the limit of the memory.

An engine counts what its steps move; the owner of a `BandwidthMeter` measures the memory, when no
request waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.inference.model import Model
from pcomm.inference.roofline.step_bytes import (
    KeptBytes,
    StepBytes,
    StepWeights,
    step_bytes,
    step_weights_of,
)

__all__ = [
    "BandwidthMeter",
    "DecodeCounts",
    "DecodeRoofline",
    "DecodeStats",
    "MemoryBandwidth",
    "measure_bandwidth",
]

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
# The least that is moved: on a CPU a model that lies in its caches is compared with these, and on a
# GPU a launch takes as long as some megabytes, which its cache would hold.
_LEAST_BYTES, _LEAST_BYTES_CUDA = 64 * _KIB, 256 * _MIB
_MOST_BYTES = _GIB
_GEMV_COLUMNS = 4096


@dataclass(frozen=True)
class MemoryBandwidth:
    """Bytes per second, read and written, of three ways to go through memory.

    Attributes:
        copy: Bytes per second of a copy.
        sum: Bytes per second of a sum over all elements.
        matrix_vector: Bytes per second of a product of a matrix and a vector.
    """

    copy: float
    sum: float
    matrix_vector: float

    @property
    def largest(self) -> float:
        """The limit: a step mostly reads, so a copy alone would be exceeded by a good one."""
        return max(self.copy, self.sum, self.matrix_vector)


def measure_bandwidth(
    num_bytes: int,
    device: torch.device,
    *,
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> MemoryBandwidth:
    """Measure with fp32 tensors; the best of several times each. Local.

    Args:
        num_bytes: Bytes that each way moves, at least 16 KiB. As much memory is allocated for the
            time of the measurement.
        device: Device whose memory is measured; on a CPU with torch's number of threads.
        repeats: Number of measurements of each way, after one that is not counted.
        clock: Seconds since any time.
    """
    rows = num_bytes // (4 * _GEMV_COLUMNS)
    matrix = torch.ones(rows, _GEMV_COLUMNS, dtype=torch.float32, device=device)
    vector = torch.ones(_GEMV_COLUMNS, dtype=torch.float32, device=device)
    source, target = matrix.view(2, -1)

    def synchronized() -> float:
        if matrix.is_cuda:
            torch.cuda.synchronize(matrix.device)
        return clock()

    def seconds(work: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(repeats + 1):
            begin = synchronized()
            work()
            times.append(synchronized() - begin)
        return min(times[1:])

    return MemoryBandwidth(
        copy=matrix.nbytes / seconds(lambda: target.copy_(source)),
        sum=matrix.nbytes / seconds(matrix.sum),
        matrix_vector=matrix.nbytes / seconds(lambda: torch.mv(matrix, vector)),
    )


Measure = Callable[[int, torch.device], MemoryBandwidth]
"""Bandwidth of a device with a number of bytes."""


class BandwidthMeter:
    """Measures a device once for each number of torch's threads, and keeps what it has found.

    Args:
        measure: Measures a number of bytes on a device.
    """

    def __init__(self, measure: Measure = measure_bandwidth) -> None:
        self._measure = measure
        self._known: dict[tuple[torch.device, int], MemoryBandwidth] = {}

    def known(self, device: torch.device) -> MemoryBandwidth | None:
        """The bandwidth of a device with torch's number of threads, if it was measured. Local."""
        return self._known.get((device, torch.get_num_threads()))

    def bandwidth(self, device: torch.device, num_bytes: int) -> MemoryBandwidth:
        """The bandwidth of a device; the first call measures it, in about a second on a CPU. Local.

        As many bytes are moved as a step has to, so that a cache which would not hold those holds
        none of these; at most 1 GiB, and fewer where a GPU has not as many left. They are free
        again after the call.

        Args:
            device: Device whose memory is measured.
            num_bytes: Bytes of the weights of the model, `StepWeights.largest`.

        Raises:
            torch.OutOfMemoryError: A GPU has not even 64 KiB left.
        """
        if (found := self.known(device)) is None:
            least = _LEAST_BYTES_CUDA if device.type == "cuda" else _LEAST_BYTES
            found = self._fitting(min(max(num_bytes, least), _MOST_BYTES), device)
            self._known[device, torch.get_num_threads()] = found
        return found

    def _fitting(self, num_bytes: int, device: torch.device) -> MemoryBandwidth:
        """Measure, with fewer bytes where weights and programs have left too little of a GPU."""
        while True:
            try:
                return self._measure(num_bytes, device)
            except torch.OutOfMemoryError:
                if num_bytes <= _LEAST_BYTES:
                    raise
                num_bytes = max(num_bytes // 4, _LEAST_BYTES)


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
        return 1e3 * self.moved.total / self.bandwidth.largest

    @property
    def ratio(self) -> float:
        """`floor_ms` by `step_ms`: 1 for steps that do nothing but wait for the memory.

        Above 1 the bandwidth was measured at another time, or on other bytes, than the steps.
        """
        return self.floor_ms / self.step_ms

    def __str__(self) -> str:
        most = "at most " if self.is_upper_bound else ""
        size = _short(self.moved.total, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))
        speed = _short(self.bandwidth.largest, (("GB/s", 1e9), ("MB/s", 1e6)))
        times = (("s", 1e3), ("ms", 1), ("us", 1e-3))
        return (
            f"a decode step {_short(self.step_ms, times)}, floor {_short(self.floor_ms, times)} "
            f"({most}{size} at {speed}), ratio {self.ratio:.2g}"
        )


def _short(number: float, units: Sequence[tuple[str, float]]) -> str:
    """Three digits, in the largest unit that gives at least 1, or else in the smallest."""
    unit, size = next((one for one in units if number >= one[1]), units[-1])
    scaled = number / size
    return f"{scaled:.3g} {unit}" if scaled < 999 else f"{scaled:.0f} {unit}"


class DecodeCounts(NamedTuple):
    """The integers that decide how many bytes a step of decoding moves.

    Attributes:
        num_requests: Number of requests.
        num_tokens: Number of tokens that are computed, drafts included; each has logits.
        kept_tokens: Number of tokens of all requests that were computed before the step.
        kept_in_windows: Number of them within each window that layers have.
    """

    num_requests: int
    num_tokens: int
    kept_tokens: int
    kept_in_windows: tuple[int, ...] = ()


class DecodeRoofline:
    """Steps of one engine. A step costs it one append; all else is computed when it is asked for.

    Args:
        model: The model.
        vocabulary: Number of token ids, the width of the logits.
        device: Device of the model.
        meter: Meter that has measured the memory of the device, or will have before `stats`.
        kept: Number of steps that are kept.

    Attributes:
        windows: Windows that layers of the model have.
    """

    def __init__(
        self,
        model: Model,
        *,
        vocabulary: int,
        device: torch.device,
        meter: BandwidthMeter,
        kept: int = 256,
    ) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._device, self._meter = device, meter
        self._num_steps = self._all_ns = 0
        self._last: deque[tuple[DecodeCounts, int]] = deque(maxlen=kept)
        self._known: tuple[StepWeights, KeptBytes] | None = None
        self.windows = tuple(KeptBytes.of(model.memory_specs()).per_token_in)

    def note(self, counts: DecodeCounts, step_ns: int) -> None:
        """Count a step that has succeeded, and took so many nanoseconds."""
        self._num_steps += 1
        self._all_ns += step_ns
        self._last.append((counts, step_ns))

    def stats(self, logits_dtype: torch.dtype) -> DecodeStats | None:
        """What is known of the steps; None before the first, or without a bandwidth. Local."""
        bandwidth, last = self._meter.known(self._device), list(self._last)
        if bandwidth is None or not last:
            return None
        if self._known is None:
            kept = KeptBytes.of(self._model.memory_specs())
            self._known = step_weights_of(self._model), kept
        weights, kept = self._known
        moved = [
            step_bytes(
                kept,
                weights=weights.most_read(counts.num_tokens),
                num_requests=counts.num_requests,
                kept_tokens=counts.kept_tokens,
                kept_in_windows=counts.kept_in_windows,
                new_tokens=counts.num_tokens,
                num_logits=counts.num_tokens * self._vocabulary,
                logits_dtype=logits_dtype,
            )
            for counts, _ in last
        ]
        middle = median_low([one.total for one in moved])
        place = next(place for place, one in enumerate(moved) if one.total == middle)
        typical = last[place][0]
        return DecodeStats(
            steps=self._num_steps,
            mean_ms=self._all_ns / self._num_steps / 1e6,
            step_ms=median([taken for _, taken in last]) / 1e6,
            num_requests=typical.num_requests,
            moved=moved[place],
            is_upper_bound=not weights.is_exact(typical.num_tokens),
            bandwidth=bandwidth,
        )
