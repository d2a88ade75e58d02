"""The NVLink domain that a described NVML reports."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from pcomm.nvls._capability import nvlink_domain


class Nvml:
    """An NVML that knows one GPU, at the offsets of `nvml.h`."""

    def __init__(self, cluster: bytes, clique: int, *, state: int = 3, status: int = 0) -> None:
        self.content = cluster + status.to_bytes(4, "little") + clique.to_bytes(4, "little")
        self.content += bytes([state])
        self.is_open = 0

    def nvmlInit_v2(self) -> int:
        self.is_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: Any, device: Any) -> int:
        if name.value != b"GPU-1":
            return 6
        device._obj.value = 77
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, device: Any, info: Any) -> int:
        assert device.value == 77
        ctypes.memmove(info, self.content, len(self.content))
        return 0


RACK = bytes(range(16))


@pytest.mark.parametrize(
    ("nvml", "uuid", "expected"),
    [
        (Nvml(RACK, 5), "GPU-1", f"NVLink domain {RACK.hex()}, clique 5"),
        (Nvml(RACK, 6), "GPU-1", f"NVLink domain {RACK.hex()}, clique 6"),
        (Nvml(RACK, 5), "GPU-2", ""),
        # A host with an NVSwitch of its own, one that is still starting, and one that failed.
        (Nvml(bytes(16), 0), "GPU-1", ""),
        (Nvml(RACK, 5, state=2), "GPU-1", ""),
        (Nvml(RACK, 5, status=999), "GPU-1", ""),
    ],
)
def test_ranks_of_one_domain_and_clique_have_the_same_text(nvml, uuid, expected):
    assert nvlink_domain(uuid, lambda _: nvml) == expected
    assert nvml.is_open == 0


def test_without_a_driver_or_with_an_old_one_there_is_no_domain() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    assert nvlink_domain("GPU-1", missing) == ""
    assert nvlink_domain("GPU-1", lambda _: ctypes.CDLL(None)) == ""
