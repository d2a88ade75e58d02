"""The bandwidth of this machine's memory, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError

__all__ = ["MemoryBandwidth", "measure_bandwidth"]

_GIB = 2**30
_GEMV_COLUMNS = 4096
_FEWEST_BYTES = 4 * _GEMV_COLUMNS


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
    num_bytes: int = _GIB,
    *,
    device: torch.device | str = "cpu",
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> MemoryBandwidth:
    """Measure with fp32 tensors; the best of several times each. Local, about a second on a CPU.

    Nothing is kept: a program that needs the result again keeps it.

    Args:
        num_bytes: Bytes that each way moves: those of the model, or 1 GiB, so that no cache holds
            them. As much memory is allocated for the time of the measurement.
        device: Device whose memory is measured; on a CPU with torch's number of threads.
        repeats: Number of measurements of each way, after one that is not counted.
        clock: Seconds since any time.

    Raises:
        ConfigError: There are too few bytes for one row of the matrix, or no repeats.
    """
    if num_bytes < _FEWEST_BYTES or repeats < 1:
        raise ConfigError(
            "measure_bandwidth",
            found=f"num_bytes = {num_bytes} and repeats = {repeats}",
            why=f"One row of a matrix has {_FEWEST_BYTES} bytes, and one time is the least.",
            fix="Give the bytes of the model, or leave both out.",
        )
    rows = num_bytes // _FEWEST_BYTES
    matrix = torch.ones(rows, _GEMV_COLUMNS, dtype=torch.float32, device=device)
    vector = torch.ones(_GEMV_COLUMNS, dtype=torch.float32, device=device)
    flat = matrix.view(-1)
    source, target = flat[: len(flat) // 2], flat[len(flat) // 2 : len(flat) // 2 * 2]

    def seconds(work: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(repeats + 1):
            _synchronize(matrix.device)
            begin = clock()
            work()
            _synchronize(matrix.device)
            times.append(clock() - begin)
        return min(times[1:])

    moved = 4 * matrix.numel()
    return MemoryBandwidth(
        copy=moved / seconds(lambda: target.copy_(source)),
        sum=moved / seconds(matrix.sum),
        matrix_vector=moved / seconds(lambda: torch.mv(matrix, vector)),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
