"""What `pcomm doctor` says of described machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import pytest

from pcomm.core.doctor.report import CudaFacts, DeviceFacts, TorchFacts
from pcomm.nvls.doctor import check_nvls

GIB = 2**30
TORCH = TorchFacts("2.13.0+cu130", "13.0", True, {"gloo": True}, "2.29.3", ("CUDA",), "")


def devices(count: int, **changes: Any) -> tuple[DeviceFacts, ...]:
    """GPUs of a host with an NVSwitch; `changes` are those of the last one."""
    made = [
        DeviceFacts("H100", (9, 0), 80 * GIB, True, False, 18, 18, frozenset({*range(count)} - {i}))
        for i in range(count)
    ]
    return (*made[:-1], replace(made[-1], **changes))


class Machine:
    def __init__(self, found: tuple[DeviceFacts, ...], **changes: Any) -> None:
        self.devices, self.changes = found, changes

    def cuda(self) -> CudaFacts | None:
        return CudaFacts("580.82", (13, 0), self.devices) if self.devices else None

    def torch(self) -> TorchFacts:
        if "torch_error" in self.changes:
            raise ImportError(self.changes["torch_error"])
        return replace(TORCH, symmetric_memory_error=self.changes.get("memory_error", ""))

    def module_version(self, name: str) -> str:
        assert name == "triton"
        if "triton" not in self.changes:
            return "3.6.0"
        raise ModuleNotFoundError(self.changes["triton"])

    def environment(self) -> Mapping[str, str]:
        return self.changes.get("environment", {})


@pytest.mark.parametrize(
    ("machine", "status", "value", "reason"),
    [
        (Machine(devices(8)), "ok", "multicast between 8 devices of sm_90", "No group was asked"),
        (
            Machine(devices(8)),
            "ok",
            "multicast between 8 devices of sm_90",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
        ),
        (Machine(devices(1)), "info", "sm_90, one device", "No group was asked"),
        (
            Machine(devices(4, has_multicast=False)),
            "info",
            "access to peers between 4 devices of sm_90",
            "device 3: the driver reports no multicast",
        ),
        (Machine(devices(2, capability=(10, 0))), "info", "groups within one of sm_100, sm_90", ""),
        (
            Machine(devices(2, peers=frozenset())),
            "info",
            "groups of devices that reach each other",
            "device 1 reaches no device 0",
        ),
        (
            Machine(devices(2, capability=(8, 0))),
            "missing",
            "torch.distributed alone",
            "device 1: compute capability of sm_80",
        ),
        (
            Machine(devices(2), memory_error="ImportError: x"),
            "missing",
            "torch.distributed alone",
            "torch has no symmetric memory (ImportError: x)",
        ),
        (
            Machine(devices(2), triton="no triton"),
            "missing",
            "torch.distributed alone",
            "Triton cannot be imported (ModuleNotFoundError: no triton)",
        ),
        (
            Machine(()),
            "missing",
            "torch.distributed alone: no CUDA device",
            "set TRITON_INTERPRET=1 to emulate",
        ),
        (
            Machine((), environment={"TRITON_INTERPRET": "1"}),
            "info",
            "kernels are emulated on the CPU",
            "for tests",
        ),
        (Machine((), torch_error="no torch"), "info", "not measured", "torch cannot be imported"),
    ],
)
def test_what_a_group_of_this_machine_could_use(machine, status, value, reason):
    (finding,) = check_nvls(machine)
    assert (finding.name, finding.status, finding.value) == ("nvls", status, value)
    assert reason in finding.reason


def test_the_entry_points_name_what_is_there() -> None:
    found = {
        group: next(iter(entry_points(group=group, name="nvls"))).load()
        for group in ("pcomm.doctor", "pcomm.collectives")
    }
    assert found["pcomm.doctor"] is check_nvls
    assert callable(found["pcomm.collectives"]())
