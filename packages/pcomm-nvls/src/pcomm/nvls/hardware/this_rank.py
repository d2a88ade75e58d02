"""The facts about this process and its device."""

from __future__ import annotations

import importlib
import os

import torch

from pcomm.core.doctor.nvidia import cuda_facts
from pcomm.core.memory.symmetric.shm import this_host
from pcomm.nvls.hardware.fabric import nvlink_domain
from pcomm.nvls.hardware.rank_facts import RankFacts

__all__ = ["ThisRank"]


class ThisRank:
    """Answers from this process, its device and its driver; see `Probe`."""

    def facts(self, device: torch.device) -> RankFacts:
        """The facts about this process. Local."""
        version, error, is_emulated = _triton()
        if device.type != "cuda":
            return RankFacts(False, version, this_host(), error, is_emulated)
        if not torch.cuda.is_available():
            return RankFacts(True, version, this_host(), error, is_emulated)
        number = torch.cuda.current_device() if device.index is None else device.index
        driver, own = cuda_facts(), _identity(number)
        devices = () if driver is None else driver.devices
        others = [other for other in range(torch.cuda.device_count()) if other != number]
        return RankFacts(
            is_cuda=True,
            triton=version,
            domain=nvlink_domain(own) or this_host(),
            triton_error=error,
            is_emulated=is_emulated,
            compute_capability=torch.cuda.get_device_capability(number),
            symmetric_memory_error=_symmetric_memory_error(),
            has_multicast=devices[number].has_multicast if number < len(devices) else None,
            device=own,
            unreachable=tuple(
                _identity(other)
                for other in others
                if not torch.cuda.can_device_access_peer(number, other)
            ),
            # Torch's own switch, for tests on one GPU; it has no multicast then.
            shares_device=os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
        )


def _triton() -> tuple[str, str, bool]:
    """Version of Triton, error of its import, and whether it interprets kernels."""
    try:
        triton = importlib.import_module("triton")
        emulation = importlib.import_module("pcomm.nvls.primitives.emulation")
    except (ImportError, AttributeError, RuntimeError) as error:
        return "", f"{type(error).__name__}: {error}", False
    return str(triton.__version__), "", bool(emulation.EMULATED.value)


def _symmetric_memory_error() -> str:
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    missing = [name for name in ("empty", "rendezvous") if not hasattr(module, name)]
    return f"it has no {' and no '.join(missing)}" if missing else ""


def _identity(number: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"
