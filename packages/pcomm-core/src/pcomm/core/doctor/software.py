"""Checks of what is installed: torch, numpy, triton, the pcomm packages; and of variables set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pcomm.core.doctor.probe import Probe
from pcomm.core.doctor.report import Finding
from pcomm.core.errors import ConfigError
from pcomm.core.process import environment

__all__ = ["check_packages", "check_torch", "check_triton", "check_variables"]

_PREFIXES = ("NCCL_", "TORCH_", "PCOMM_", "GLOO_", "CUDA_")
_NAMES = ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD", "TRITON_INTERPRET")

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


def check_torch(probe: Probe) -> Iterable[Finding]:
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


def check_triton(probe: Probe) -> Iterable[Finding]:
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


def check_packages(probe: Probe) -> Iterable[Finding]:
    """The installed packages of pcomm."""
    for name, version in sorted(probe.distributions().items()):
        if name.startswith("pcomm-"):
            yield Finding(name, "ok", version)


def check_variables(probe: Probe) -> Iterable[Finding]:
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


def _module(probe: Probe, name: str, without: str, distribution: str) -> Finding:
    try:
        return Finding(name, "ok", probe.module_version(name))
    except ImportError as error:
        reason = f"{error}; {without}."
        fix = f"`python3 -m pip install {distribution}`"
        return Finding(name, "missing", "cannot be imported", reason, fix)
