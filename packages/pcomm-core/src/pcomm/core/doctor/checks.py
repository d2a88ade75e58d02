"""Checks of the host, its software, its NCCL, and its GPUs with the paths between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from itertools import permutations

from pcomm.core import environment
from pcomm.core.doctor.report import (
    CudaFacts,
    DeviceFacts,
    Finding,
    MachineProbe,
    NcclFile,
    TorchFacts,
)
from pcomm.core.errors import ConfigError

__all__ = [
    "check_gpus",
    "check_host_name",
    "check_nccl",
    "check_open_files",
    "check_packages",
    "check_process",
    "check_shared_memory",
    "check_symmetric_memory",
    "check_torch",
    "check_triton",
    "check_variables",
]


_MIB = 2**20
_GIB = 2**30
# A rank keeps several descriptors open for every peer; 1,024 is what most systems start with and
# what jobs of a few hundred ranks run into.
_FEW_OPEN_FILES = 4096


_ON_HOSTS = (
    "Nothing on one host. Between hosts pcomm takes the interface on the route to rank 0; for "
    "other programs set GLOO_SOCKET_IFNAME, or the name in /etc/hosts."
)


def check_process(probe: MachineProbe) -> Iterable[Finding]:
    """Python, the platform, cores and memory."""
    host = probe.host()
    yield Finding("python", "ok", host.python)
    yield Finding("platform", "info", host.platform)
    cores = f"{host.num_cores} usable by this process"
    limit = host.core_limit
    if limit is not None and limit < host.num_cores:
        reason = "Threads beyond the limit of its control group wait for each other."
        fix = f"Set OMP_NUM_THREADS={max(1, int(limit))} for one process, less for several."
        yield Finding("cores", "info", f"{cores}, for the time of {limit:g}", reason, fix)
    else:
        yield Finding("cores", "info", cores)
    memory = "not known" if host.memory_bytes is None else f"{host.memory_bytes / _GIB:.1f} GiB"
    most = host.memory_limit_bytes
    if most is not None and (host.memory_bytes is None or most < host.memory_bytes):
        reason = "The system ends a process of its control group that takes more."
        yield Finding("memory", "info", f"{memory}, of which {most / _GIB:.1f} GiB", reason)
    else:
        yield Finding("memory", "info", memory)


def check_host_name(probe: MachineProbe) -> Iterable[Finding]:
    """The address that the host's name resolves to, which gloo binds."""
    host = probe.host()
    if not host.addresses:
        reason = "The name resolves to no address, so gloo binds loopback."
        yield Finding("host", "info", host.name or "not known", reason, _ON_HOSTS)
        return
    value = f"{host.name}, {', '.join(host.addresses)}"
    if ip_address(host.addresses[0].partition("%")[0]).is_loopback:
        reason = "Gloo binds the first address, which other hosts do not reach."
        yield Finding("host", "info", value, reason, _ON_HOSTS)
    else:
        yield Finding("host", "ok", value)


def check_shared_memory(probe: MachineProbe) -> Iterable[Finding]:
    """Room in `/dev/shm`, where ranks on one host exchange data."""
    host = probe.host()
    if host.shared_memory_bytes is None or host.shared_memory_free_bytes is None:
        yield Finding("shared_memory", "missing", "no /dev/shm", "This system has no such folder.")
        return
    total, free = host.shared_memory_bytes, host.shared_memory_free_bytes
    value = f"{free / _MIB:,.0f} of {total / _MIB:,.0f} MiB free"
    fix = "Give a container more with `--shm-size=8g`, or delete what was left in /dev/shm."
    if free < 16 * _MIB:
        reason = "NCCL and local ranks share buffers there and fail when it is full."
        yield Finding("shared_memory", "broken", value, reason, fix)
    elif free < _GIB:
        reason = "Enough for a few ranks; NCCL takes tens of MiB for each GPU of a host."
        yield Finding("shared_memory", "info", value, reason, fix)
    else:
        yield Finding("shared_memory", "ok", value)


def check_open_files(probe: MachineProbe) -> Iterable[Finding]:
    """The limit of open files."""
    limit = probe.host().open_files
    if limit is None:
        yield Finding("open_files", "info", "limit not known")
    elif limit < _FEW_OPEN_FILES:
        reason = "Ranks keep several descriptors open for every peer; large jobs run out of them."
        fix = f"Run `ulimit -n {_FEW_OPEN_FILES}` or more before starting ranks."
        yield Finding("open_files", "info", f"limit {limit:,}", reason, fix)
    else:
        yield Finding("open_files", "ok", f"limit {limit:,}")


_PREFIXES = ("NCCL_", "TORCH_", "PCOMM_", "GLOO_", "CUDA_")
_NAMES = (
    *("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD", "TRITON_INTERPRET"),
    *("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),
)
# Settings that quietly take a feature away; what a user most often forgets to have set.
_COSTS = {
    ("NCCL_P2P_DISABLE", "1"): "NCCL may not use NVLink or PCIe between the GPUs of this host.",
    ("NCCL_SHM_DISABLE", "1"): "NCCL may not use shared memory between the GPUs of this host.",
    ("NCCL_NVLS_ENABLE", "0"): "NCCL may not use NVLink multicast.",
    ("NCCL_IB_DISABLE", "1"): "NCCL may not use InfiniBand or RoCE between hosts.",
    ("CUDA_VISIBLE_DEVICES", ""): "No GPU is visible to this process.",
    ("CUDA_LAUNCH_BLOCKING", "1"): "Every kernel is waited for, so nothing overlaps.",
    ("TRITON_INTERPRET", "1"): "Triton kernels run on the CPU, one element block at a time.",
}


_WITH_AMX = "With AMX the bits of a row of a product in bf16 depend on the number of rows."


def check_torch(probe: MachineProbe) -> Iterable[Finding]:
    """Torch, its build and its backends, and numpy."""
    try:
        torch = probe.torch()
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        fix = "Install it again: `python3 -m pip install --force-reinstall 'torch>=2.10'`."
        yield Finding("torch", "broken", "cannot be imported", reason, fix)
        return
    build = "CPU build" if torch.cuda is None else f"built for CUDA {torch.cuda}"
    yield Finding("torch", "ok", f"{torch.version}, {build}")
    sets = ", ".join(torch.instructions) or "none that torch asks for"
    reason = _WITH_AMX if "AMX" in torch.instructions else ""
    yield Finding("torch.instructions", "info", sets, reason)
    if not torch.is_distributed:
        reason = "Without torch.distributed no two ranks can communicate."
        fix = "Install torch from PyPI, whose builds have it."
        yield Finding("torch.distributed", "broken", "not in this build", reason, fix)
        return
    backends = ", ".join(f"{name}: {'yes' if b else 'no'}" for name, b in torch.backends.items())
    if torch.backends.get("gloo"):
        yield Finding("torch.distributed", "ok", backends)
    else:
        reason = "Ranks compare their plans over gloo, also when data travels over NCCL."
        yield Finding("torch.distributed", "broken", backends, reason, "Install torch from PyPI.")
    yield _module(probe, "numpy", "torch exchanges no arrays with numpy without it", "numpy")


def check_triton(probe: MachineProbe) -> Iterable[Finding]:
    """Triton, and whether its interpreter can be imported."""
    lost = "kernels written in Triton are not available"
    found = _module(probe, "triton", lost, "'triton>=3.6'")
    yield found
    if found.status != "ok":
        return
    try:
        probe.module_version("triton.runtime.interpreter")
        probe.module_version("numpy")
    except ImportError as error:
        yield Finding("triton.interpreter", "missing", "cannot be imported", str(error))
    else:
        yield Finding("triton.interpreter", "ok", "imports; TRITON_INTERPRET=1 turns it on")


def check_packages(probe: MachineProbe) -> Iterable[Finding]:
    """The installed packages of pcomm."""
    for name, version in sorted(probe.distributions().items()):
        if name.startswith("pcomm-"):
            yield Finding(name, "ok", version)


def check_variables(probe: MachineProbe) -> Iterable[Finding]:
    """Every variable that changes how ranks communicate or compute."""
    environ = probe.environment()
    shown = sorted(name for name in environ if name.startswith(_PREFIXES) or name in _NAMES)
    for name in shown:
        value = environ[name]
        yield Finding(f"${name}", "info", repr(value), _COSTS.get((name, value), ""))
    if not shown:
        yield Finding("variables", "info", "none set that changes communication")
    yield from _own_variables(environ)


def _own_variables(environ: Mapping[str, str]) -> Iterable[Finding]:
    try:
        environment.check(environ)
    except ConfigError as error:
        yield Finding("variables", "broken", f"{error.asked}: {error.found}", error.why, error.fix)


def _module(probe: MachineProbe, name: str, without: str, distribution: str) -> Finding:
    try:
        return Finding(name, "ok", probe.module_version(name))
    except ImportError as error:
        reason = f"{error}; {without}."
        fix = f"`python3 -m pip install {distribution}`"
        return Finding(name, "missing", "cannot be imported", reason, fix)


_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def check_nccl(probe: MachineProbe) -> Iterable[Finding]:
    """The NCCL of torch, the NCCL wheels, and the NCCL libraries on disk."""
    try:
        torch = probe.torch()
    except (ImportError, OSError, RuntimeError):
        # Told by the check of torch. The wheels can be judged without it.
        torch = None
    wheels = {name: version for name, version in probe.distributions().items() if name in _WHEELS}
    files = probe.nccl_files()
    yield _torch_nccl(torch, wheels, files)
    if wheels:
        yield _wheels(wheels, torch)
    if files:
        yield _files(files)


def _torch_nccl(
    torch: TorchFacts | None, wheels: Mapping[str, str], files: Sequence[NcclFile]
) -> Finding:
    if torch is None:
        return Finding("nccl", "info", "not measured", "torch cannot be imported.")
    if torch.cuda is None:
        reason = "This torch is a CPU build; ranks communicate over gloo."
        return Finding("nccl", "missing", "not in this build of torch", reason)
    if not torch.backends.get("nccl"):
        reason = f"torch {torch.version} is a CUDA build without the NCCL backend."
        fix = "Install torch from PyPI on Linux, whose CUDA builds have it."
        return Finding("nccl", "missing", "not in this build of torch", reason, fix)
    used = [file for file in files if file.is_loaded]
    value = f"torch was built with {torch.nccl or 'a version it does not tell'}"
    if used:
        value += f", loaded {_version(used[0])}"
    elif not wheels and not files:
        value += ", linked into torch or not loaded yet"
    return Finding("nccl", "ok", value)


def _wheels(wheels: Mapping[str, str], torch: TorchFacts | None) -> Finding:
    value = ", ".join(f"{name} {version}" for name, version in sorted(wheels.items()))
    wanted = None
    if torch is not None and torch.cuda is not None:
        wanted = f"nvidia-nccl-cu{torch.cuda.partition('.')[0]}"
    if len(wheels) > 1:
        keep = wanted if wanted in wheels else None
        reason = "Both write the folder nvidia/nccl/, so what is there is the one installed last."
        fix = f"Run `python3 -m pip uninstall -y {' '.join(sorted(wheels))}`"
        if keep is None:
            fix += ", then install torch again, which brings the one it needs."
        else:
            fix += f", then `python3 -m pip install {keep}=={wheels[keep]}`."
        return Finding("nccl.wheels", "broken", value, reason, fix)
    if wanted is not None and wanted not in wheels:
        assert torch is not None
        reason = (
            f"torch {torch.version} is built for CUDA {torch.cuda}, whose wheel is {wanted}; "
            "a library for another CUDA lies where torch looks first."
        )
        fix = f"Run `python3 -m pip uninstall -y {next(iter(wheels))}`, then install torch again."
        return Finding("nccl.wheels", "broken", value, reason, fix)
    return Finding("nccl.wheels", "ok", value)


def _files(files: Sequence[NcclFile]) -> Finding:
    value = "\n".join(f"{file.path} ({file.origin}, {_version(file)})" for file in files)
    loaded = [file for file in files if file.is_loaded]
    if len(loaded) > 1:
        reason = "More than one NCCL is loaded into this process, and each has its own state."
        fix = "Take the others out of LD_LIBRARY_PATH and LD_PRELOAD, and start again."
        return Finding("nccl.libraries", "broken", value, reason, fix)
    if len(files) == 1:
        return Finding("nccl.libraries", "ok", value)
    which = f"{loaded[0].path} is the one loaded" if loaded else "none of them is loaded here"
    reason = f"Found {len(files)} times; {which}. LD_LIBRARY_PATH and LD_PRELOAD decide."
    return Finding("nccl.libraries", "info", value, reason)


def _version(file: NcclFile) -> str:
    return file.version or "version not known"


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


def check_gpus(probe: MachineProbe) -> Iterable[Finding]:
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


def check_symmetric_memory(probe: MachineProbe) -> Iterable[Finding]:
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


def _torch(probe: MachineProbe) -> TorchFacts | None:
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
