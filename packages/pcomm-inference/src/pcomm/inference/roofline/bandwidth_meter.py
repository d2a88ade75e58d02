"""The bandwidth of each device, measured when it is asked for first, and kept by the owner."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pcomm.inference.roofline.bandwidth import MemoryBandwidth, measure_bandwidth

__all__ = ["BandwidthMeter"]

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
# The least that is moved: on a CPU a model that lies in its caches is compared with these, and on a
# GPU a launch takes as long as some megabytes, which its cache would hold.
_LEAST_BYTES, _LEAST_BYTES_CUDA = 64 * _KIB, 256 * _MIB
_MOST_BYTES = _GIB

Measure = Callable[[int, torch.device], MemoryBandwidth]
"""Bandwidth of a device with a number of bytes."""


def _measure(num_bytes: int, device: torch.device) -> MemoryBandwidth:
    return measure_bandwidth(num_bytes, device=device, repeats=2)


class BandwidthMeter:
    """Measures a device once for each number of torch's threads; for one engine or for many.

    What is known ends with this object: a program that makes several engines gives all of them one
    meter, and otherwise each engine has its own.

    Args:
        measure: Measures a number of bytes on a device.
    """

    def __init__(self, measure: Measure = _measure) -> None:
        self._measure = measure
        self._known: dict[tuple[torch.device, int], MemoryBandwidth] = {}

    def bandwidth(self, device: torch.device, num_bytes: int) -> MemoryBandwidth:
        """The bandwidth of a device; the first call measures it. Local.

        As many bytes are moved as a step has to, so that a cache which would not hold those holds
        none of these; at most 1 GiB. They are free again after the call.

        Args:
            device: Device whose memory is measured.
            num_bytes: Bytes of the weights of the model.
        """
        key = (device, torch.get_num_threads())
        if key not in self._known:
            least = _LEAST_BYTES_CUDA if device.type == "cuda" else _LEAST_BYTES
            self._known[key] = self._fitting(min(max(num_bytes, least), _MOST_BYTES), device)
        return self._known[key]

    def _fitting(self, num_bytes: int, device: torch.device) -> MemoryBandwidth:
        """With fewer bytes where the pools of an engine have left too little memory of a GPU."""
        while True:
            try:
                return self._measure(num_bytes, device)
            except torch.OutOfMemoryError:
                if num_bytes <= _LEAST_BYTES:
                    raise
                num_bytes = max(num_bytes // 4, _LEAST_BYTES)
