"""The NVLink domain of a GPU, which NVML knows where it spans several hosts.

Asked through ctypes. The structure and the numbers are those of `nvml.h`, `nvmlGpuFabricInfo_t`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["nvlink_domain"]

_COMPLETED = 3


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def nvlink_domain(uuid: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> str:
    """A text that GPUs of one NVLink domain of several hosts share; empty within one host. Local.

    Args:
        uuid: UUID of the GPU, such as `GPU-5c64...`.
        load: Opens a shared library by name and raises `OSError` if there is none.
    """
    try:
        nvml = load("libnvidia-ml.so.1")
        ask = nvml.nvmlDeviceGetGpuFabricInfo
        if nvml.nvmlInit_v2() != 0:
            return ""
    except (OSError, AttributeError):
        # No driver, or one from before such domains.
        return ""
    try:
        device, info = ctypes.c_void_p(), _FabricInfo()
        name = ctypes.c_char_p(uuid.encode())
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)) != 0:
            return ""
        if ask(device, ctypes.byref(info)) != 0:
            return ""
    finally:
        nvml.nvmlShutdown()
    cluster = bytes(info.cluster)
    # A single host has zeros there.
    if info.state != _COMPLETED or info.status != 0 or not any(cluster):
        return ""
    return f"NVLink domain {cluster.hex()}, clique {info.clique}"
