"""Asks the CUDA driver and NVML, through ctypes, without a CUDA context and without torch.

No context means that no GPU memory is taken. Devices are those that CUDA shows to this process;
NVML counts all of the host, so the two are matched by PCI address. The numbers below are those of
the CUDA driver API (`cuda.h`) and of NVML (`nvml.h`), which never change their meaning.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

from pcomm.core.doctor.probe import CudaFacts, DeviceFacts

__all__ = ["cuda_facts"]

_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76
_MULTICAST_SUPPORTED: Final = 132
_MIG_ENABLED: Final = 1
_LINK_ACTIVE: Final = 1
_REMOTE_IS_SWITCH: Final = 2
# More than any GPU has; NVML refuses the numbers above the last link.
_MAX_NVLINKS: Final = 64
_TEXT_BYTES: Final = 96


def cuda_facts(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> CudaFacts | None:
    """What the driver and NVML say; None where there is no driver.

    Args:
        load: Opens a shared library by name and raises `OSError` if there is none.
    """
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return None
    nvml = _open_nvml(load)
    try:
        version = _text(nvml, "nvmlSystemGetDriverVersion") if nvml is not None else None
        code = driver.cuInit(0)
        if code != 0:
            return CudaFacts(version, None, (), _error_text(driver, code), code)
        number = _int(driver, "cuDriverGetVersion")
        cuda = None if number is None else (number // 1000, number % 1000 // 10)
        handles = [
            _int(driver, "cuDeviceGet", index) or 0
            for index in range(_int(driver, "cuDeviceGetCount") or 0)
        ]
        devices = tuple(_device(driver, nvml, handle, handles) for handle in handles)
        return CudaFacts(version, cuda, devices)
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _open_nvml(load: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL | None:
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if _succeeds(nvml, "nvmlInit_v2") else None


def _device(
    driver: ctypes.CDLL, nvml: ctypes.CDLL | None, handle: int, handles: list[int]
) -> DeviceFacts:
    memory = ctypes.c_size_t()
    _succeeds(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    multicast = _int(driver, "cuDeviceGetAttribute", _MULTICAST_SUPPORTED, handle)
    managed = _managed_device(nvml, _text(driver, "cuDeviceGetPCIBusId", handle) or "")
    is_mig, nvlinks, to_switch = None, None, None
    if nvml is not None and managed is not None:
        is_mig = _is_mig(nvml, managed)
        nvlinks, to_switch = _nvlinks(nvml, managed)
    return DeviceFacts(
        name=_text(driver, "cuDeviceGetName", handle) or "unknown",
        capability=(
            _int(driver, "cuDeviceGetAttribute", _CAPABILITY_MAJOR, handle) or 0,
            _int(driver, "cuDeviceGetAttribute", _CAPABILITY_MINOR, handle) or 0,
        ),
        memory_bytes=memory.value,
        has_multicast=None if multicast is None else bool(multicast),
        is_mig=is_mig,
        nvlinks=nvlinks,
        nvlinks_to_switch=to_switch,
        peers=frozenset(
            index
            for index, other in enumerate(handles)
            if other != handle and _int(driver, "cuDeviceCanAccessPeer", handle, other)
        ),
    )


def _managed_device(nvml: ctypes.CDLL | None, pci_address: str) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    address = ctypes.c_char_p(pci_address.encode())
    find = "nvmlDeviceGetHandleByPciBusId_v2"
    if nvml is None or not _succeeds(nvml, find, address, ctypes.byref(device)):
        return None
    return device


def _is_mig(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> bool:
    # A GPU that cannot be split answers "not supported", which is a no.
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    arguments = (device, ctypes.byref(mode), ctypes.byref(pending))
    return _succeeds(nvml, "nvmlDeviceGetMigMode", *arguments) and mode.value == _MIG_ENABLED


def _nvlinks(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[int, int]:
    active = to_switch = 0
    for link in range(_MAX_NVLINKS):
        state, remote = ctypes.c_uint(), ctypes.c_uint()
        if not _succeeds(nvml, "nvmlDeviceGetNvLinkState", device, link, ctypes.byref(state)):
            continue
        if state.value != _LINK_ACTIVE:
            continue
        active += 1
        question = "nvmlDeviceGetNvLinkRemoteDeviceType"
        if _succeeds(nvml, question, device, link, ctypes.byref(remote)):
            to_switch += remote.value == _REMOTE_IS_SWITCH
    return active, to_switch


def _error_text(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    if _succeeds(driver, "cuGetErrorString", code, ctypes.byref(text)) and text.value:
        return text.value.decode(errors="replace")
    return "unknown error"


def _int(library: ctypes.CDLL, function: str, *arguments: object) -> int | None:
    """The int that `function` writes to its first argument; None if it answers with an error."""
    value = ctypes.c_int()
    return value.value if _succeeds(library, function, ctypes.byref(value), *arguments) else None


def _text(library: ctypes.CDLL, function: str, *arguments: object) -> str | None:
    """The text that `function` writes to its first two arguments, a buffer and its size."""
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    if not _succeeds(library, function, buffer, _TEXT_BYTES, *arguments):
        return None
    return buffer.value.decode(errors="replace")


def _succeeds(library: ctypes.CDLL, function: str, *arguments: object) -> bool:
    # An old driver lacks some functions; asking it then is like an answer "not supported".
    call = getattr(library, function, None)
    return call is not None and call(*arguments) == 0
