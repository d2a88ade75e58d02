"""What the doctor reads from libcuda and NVML, through libraries that answer like them."""

from __future__ import annotations

from typing import Any

import pytest

from pcomm.core.doctor.report import CudaFacts, DeviceFacts
from pcomm.core.doctor.this_machine import cuda_facts

GIB = 2**30


class FakeLibraries:
    """libcuda and NVML of a host with three GPUs, of which CUDA shows the last two."""

    def __init__(self, *, init: int = 0, without: frozenset[str] = frozenset()) -> None:
        self.init, self.without, self.is_shut_down = init, without, False

    def load(self, name: str) -> Any:
        if name in self.without:
            raise OSError(f"{name}: cannot open shared object file")
        return self

    def __getattribute__(self, name: str) -> Any:
        # As with a library that lacks a function.
        if name.startswith(("cu", "nvml")) and name in self.without:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"system not yet initialized"
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12090
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index + 10
        return 0

    def cuDeviceGetName(self, text: Any, size: int, handle: int) -> int:
        text.value = f"GPU {handle}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, handle: int) -> int:
        memory._obj.value = 80 * GIB
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: int) -> int:
        value._obj.value = {75: 9, 76: 0, 132: handle == 10}[attribute]
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, handle: int) -> int:
        text.value = f"0000:{handle}:00.0".encode()
        return 0

    def cuDeviceCanAccessPeer(self, able: Any, handle: int, other: int) -> int:
        able._obj.value = (handle, other) == (10, 11)
        return 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.is_shut_down = True
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"575.1"
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, device: Any) -> int:
        device._obj.value = {b"0000:10:00.0": 1, b"0000:11:00.0": 2}[address.value]
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, mode: Any, pending: Any) -> int:
        mode._obj.value = device.value == 2
        return 0

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int, state: Any) -> int:
        # Six links, the first of them down; NVML refuses higher numbers.
        state._obj.value = link > 0
        return 0 if link < 6 else 2

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device: Any, link: int, kind: Any) -> int:
        kind._obj.value = 2 if link < 4 else 0
        return 0


def test_facts_come_from_the_driver_and_nvml() -> None:
    libraries = FakeLibraries()
    facts = cuda_facts(libraries.load)
    assert facts is not None
    assert (facts.driver, facts.cuda, facts.error_code) == ("575.1", (12, 9), 0)
    first, second = facts.devices
    assert first == DeviceFacts("GPU 10", (9, 0), 80 * GIB, True, False, 5, 3, frozenset({1}))
    assert second == DeviceFacts("GPU 11", (9, 0), 80 * GIB, False, True, 5, 3, frozenset())
    assert libraries.is_shut_down


def test_no_driver_is_none_and_a_driver_that_fails_keeps_its_words() -> None:
    assert cuda_facts(FakeLibraries(without=frozenset({"libcuda.so.1"})).load) is None
    libraries = FakeLibraries(init=802)
    facts = cuda_facts(libraries.load)
    assert facts == CudaFacts("575.1", None, (), "system not yet initialized", 802)
    assert libraries.is_shut_down


@pytest.mark.parametrize(
    "without", ["libnvidia-ml.so.1", "nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2"]
)
def test_without_nvml_links_and_instances_are_not_known(without: str) -> None:
    facts = cuda_facts(FakeLibraries(without=frozenset({without})).load)
    assert facts is not None
    for device in facts.devices:
        assert (device.is_mig, device.nvlinks, device.nvlinks_to_switch) == (None, None, None)
        assert device.memory_bytes == 80 * GIB
