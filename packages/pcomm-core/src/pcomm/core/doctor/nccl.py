"""Checks of NCCL: which libraries there are, whether one overwrote another, which one is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pcomm.core.doctor.probe import NcclFile, Probe, TorchFacts
from pcomm.core.doctor.report import Finding

__all__ = ["check_nccl"]

_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def check_nccl(probe: Probe) -> Iterable[Finding]:
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
