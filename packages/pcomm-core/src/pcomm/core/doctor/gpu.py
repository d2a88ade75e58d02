"""Checks of CUDA devices and of the paths between them: driver, NVLink, multicast, peers, MIG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations

from pcomm.core.doctor.probe import CudaFacts, DeviceFacts, Probe, TorchFacts
from pcomm.core.doctor.report import Finding

__all__ = ["check_gpus", "check_symmetric_memory"]

_GIB = 2**30

_LINKS = ("cuda.mig", "cuda.nvlink", "cuda.multicast", "cuda.peer_access")

# What the driver answers when it cannot start, and what helps. Source: CUDA driver API, CUresult.
_DRIVER_FIXES = {
    3: "Reboot, or load the kernel module again with `modprobe nvidia`.",
    802: "Start the fabric manager (`systemctl start nvidia-fabricmanager`), or wait for it.",
    803: "Make the kernel module and libcuda the same version; after an update, reboot.",
    804: "Remove the CUDA compatibility package, or use a GPU that it supports.",
    999: "Look at `dmesg` and `nvidia-smi`; reboot if they name no cause.",
}
_NO_DEVICE = 100


def check_gpus(probe: Probe) -> Iterable[Finding]:
    """The driver, each device, and what connects them."""
    cuda = probe.cuda()
    yield _driver(cuda, _torch(probe))
    if cuda is None or not cuda.devices:
        value = f"no GPU: {len(_LINKS)} checks of links between GPUs left out"
        yield Finding("cuda.devices", "missing", value)
        return
    for number, device in enumerate(cuda.devices):
        major, minor = device.capability
        memory = f"{device.memory_bytes / _GIB:.1f} GiB"
        value = f"{device.name}, compute capability {major}.{minor}, {memory}"
        yield Finding(f"cuda.device.{number}", "ok", value)
    yield _mig(cuda.devices)
    yield _nvlink(cuda.devices)
    yield _multicast(cuda.devices)
    yield _peer_access(cuda.devices)


def check_symmetric_memory(probe: Probe) -> Iterable[Finding]:
    """Whether torch could map memory of other GPUs; no mapping is tried."""
    name = "symmetric_memory"
    torch, cuda = _torch(probe), probe.cuda()
    if torch is None:
        yield Finding(name, "info", "not measured", "torch cannot be imported.")
    elif torch.symmetric_memory_error:
        yield Finding(name, "missing", "not in this torch", torch.symmetric_memory_error)
    elif cuda is None or not cuda.devices:
        yield Finding(name, "missing", "no CUDA device", "torch maps memory of CUDA devices only.")
    elif torch.cuda is None:
        yield Finding(name, "missing", "not in this torch", "This torch is a CPU build.")
    else:
        allocators = ", ".join(torch.symmetric_memory) or "its default allocator"
        reason = "No memory was mapped: that takes one process for each GPU."
        yield Finding(name, "info", f"torch has {allocators}; not measured", reason)


def _torch(probe: Probe) -> TorchFacts | None:
    try:
        return probe.torch()
    except (ImportError, OSError, RuntimeError):
        # Told by the check of torch.
        return None


def _driver(cuda: CudaFacts | None, torch: TorchFacts | None) -> Finding:
    name = "cuda.driver"
    if cuda is None:
        return Finding(name, "missing", "no CUDA driver", "libcuda.so.1 is not on this machine.")
    version = f"driver {cuda.driver or 'of unknown version'}"
    if cuda.error_code == _NO_DEVICE:
        return Finding(name, "missing", f"{version}, no CUDA device", cuda.error)
    if cuda.error_code:
        fix = _DRIVER_FIXES.get(cuda.error_code, "Run `nvidia-smi` and follow what it reports.")
        reason = f"The driver did not start: {cuda.error} ({cuda.error_code})."
        return Finding(name, "broken", version, reason, fix)
    if cuda.cuda is None:
        return Finding(name, "info", f"{version}; its CUDA version is not known")
    value = f"{version}, runs CUDA up to {cuda.cuda[0]}.{cuda.cuda[1]}"
    if not cuda.devices:
        reason = "The driver shows no device to this process."
        fix = "Unset CUDA_VISIBLE_DEVICES, or start the container with its GPUs."
        return Finding(name, "missing", value, reason, fix)
    if torch is not None and torch.cuda is None:
        reason = f"torch {torch.version} is a CPU build and uses no GPU."
        fix = "Install a CUDA build: `python3 -m pip install --force-reinstall torch` from PyPI."
        return Finding(name, "missing", value, reason, fix)
    if torch is not None and torch.cuda is not None:
        major = int(torch.cuda.partition(".")[0])
        if major > cuda.cuda[0]:
            reason = f"torch {torch.version} is built for CUDA {torch.cuda}, newer than that."
            fix = f"Update the driver, or install a torch built for CUDA {cuda.cuda[0]}."
            return Finding(name, "broken", value, reason, fix)
    return Finding(name, "ok", value)


def _mig(devices: Sequence[DeviceFacts]) -> Finding:
    split = [number for number, device in enumerate(devices) if device.is_mig]
    if split:
        reason = "Instances of a split GPU have no NVLink and cannot reach each other's memory."
        return Finding("cuda.mig", "info", f"on for {_devices(split)}", reason)
    if any(device.is_mig is None for device in devices):
        return Finding("cuda.mig", "info", "not measured", "NVML does not tell.")
    return Finding("cuda.mig", "ok", "off")


def _nvlink(devices: Sequence[DeviceFacts]) -> Finding:
    counts = [device.nvlinks for device in devices]
    if any(count is None for count in counts):
        return Finding("cuda.nvlink", "info", "not measured", "NVML does not tell.")
    if not any(counts):
        reason = "No NVLink is active; GPUs reach each other over PCIe, if at all."
        return Finding("cuda.nvlink", "missing", "none", reason)
    rows = [
        f"device {number}: {device.nvlinks} active, {device.nvlinks_to_switch or 0} to an NVSwitch"
        for number, device in enumerate(devices)
    ]
    if len(set(counts)) > 1:
        reason = "GPUs of one host normally have equally many links; some may be down."
        return Finding("cuda.nvlink", "info", "\n".join(rows), reason)
    return Finding("cuda.nvlink", "ok", rows[0] if len(rows) == 1 else _same(devices))


def _same(devices: Sequence[DeviceFacts]) -> str:
    first = devices[0]
    switched = {device.nvlinks_to_switch for device in devices}
    to_switch = f", {first.nvlinks_to_switch or 0} to an NVSwitch" if len(switched) == 1 else ""
    return f"{len(devices)} devices, each {first.nvlinks} active{to_switch}"


def _multicast(devices: Sequence[DeviceFacts]) -> Finding:
    name = "cuda.multicast"
    if any(device.has_multicast is None for device in devices):
        return Finding(name, "info", "not measured", "This driver does not know the question.")
    without = [number for number, device in enumerate(devices) if not device.has_multicast]
    if without:
        reason = (
            "NVLink multicast takes an NVSwitch (Hopper or newer), a driver that has it, no MIG."
        )
        return Finding(name, "missing", f"not on {_devices(without)}", reason)
    reason = "" if len(devices) > 1 else "One device alone has no peer to send to; not measured."
    return Finding(name, "ok", f"reported by the driver for all {len(devices)} devices", reason)


def _peer_access(devices: Sequence[DeviceFacts]) -> Finding:
    name = "cuda.peer_access"
    if len(devices) == 1:
        return Finding(name, "info", "one device, so there is no peer")
    pairs = list(permutations(range(len(devices)), 2))
    if all(there in devices[here].peers for here, there in pairs):
        return Finding(name, "ok", f"each of the {len(devices)} devices reaches all others")
    rows = [
        f"device {number} reaches {_devices(sorted(device.peers)) if device.peers else 'none'}"
        for number, device in enumerate(devices)
    ]
    reason = "Kernels that read a peer's memory do not run between the other pairs."
    return Finding(name, "missing", "\n".join(rows), reason)


def _devices(numbers: Sequence[int]) -> str:
    return ("device " if len(numbers) == 1 else "devices ") + ", ".join(map(str, numbers))
