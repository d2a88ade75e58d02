"""The doctor on described machines: what it calls ok, missing and broken, and what it advises."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pcomm.core.doctor import checks
from pcomm.core.doctor import command as self_test
from pcomm.core.doctor.command import CHECKS, Check, examine
from pcomm.core.doctor.report import (
    CudaFacts,
    DeviceFacts,
    Finding,
    HostFacts,
    MachineProbe,
    MachineReport,
    NcclFile,
    TorchFacts,
)
from pcomm.core.doctor.this_machine import ThisMachine, nccl_version

GIB = 2**30

HOST = HostFacts("3.12.1 CPython", "Linux", 8, 64 * GIB, 32 * GIB, 31 * GIB, 65536)
CPU_TORCH = TorchFacts(
    version="2.13.0+cpu",
    cuda=None,
    is_distributed=True,
    backends={"gloo": True, "nccl": False, "mpi": False},
    nccl=None,
    symmetric_memory=("CUDA",),
    symmetric_memory_error="",
)
CUDA_TORCH = replace(
    CPU_TORCH,
    version="2.13.0+cu130",
    cuda="13.0",
    backends={"gloo": True, "nccl": True, "mpi": False},
    nccl="2.29.3",
)
WHEEL = NcclFile("/site/nvidia/nccl/lib/libnccl.so.2", "wheel", "2.29.3+cuda13.0", True)
SYSTEM = NcclFile("/usr/lib/libnccl.so.2", "system", "2.20.5+cuda12.4", False)


def devices(count: int, **changes: Any) -> tuple[DeviceFacts, ...]:
    """GPUs of a host with an NVSwitch, each with `changes`."""
    return tuple(
        replace(
            DeviceFacts(
                name="NVIDIA H100",
                capability=(9, 0),
                memory_bytes=80 * GIB,
                has_multicast=True,
                is_mig=False,
                nvlinks=18,
                nvlinks_to_switch=18,
                peers=frozenset(range(count)) - {number},
            ),
            **changes,
        )
        for number in range(count)
    )


EIGHT_GPUS = CudaFacts("580.82", (13, 0), devices(8))


@dataclass
class FakeMachine:
    """A machine that a test describes; by default eight GPUs, and nothing wrong."""

    facts: HostFacts = HOST
    installed: TorchFacts | ImportError = CUDA_TORCH
    driver: CudaFacts | None = EIGHT_GPUS
    nccl: tuple[NcclFile, ...] = (WHEEL,)
    wheels: Mapping[str, str] = field(
        default_factory=lambda: {"pcomm-core": "0.1.0", "nvidia-nccl-cu13": "2.29.3"}
    )
    modules: Mapping[str, str] = field(
        default_factory=lambda: {
            "numpy": "2.4.0",
            "triton": "3.6.0",
            "triton.runtime.interpreter": "version not known",
        }
    )
    variables: Mapping[str, str] = field(default_factory=dict)
    total: float | Exception = 3.0

    def host(self) -> HostFacts:
        return self.facts

    def environment(self) -> Mapping[str, str]:
        return self.variables

    def distributions(self) -> Mapping[str, str]:
        return self.wheels

    def module_version(self, name: str) -> str:
        if name not in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return self.modules[name]

    def torch(self) -> TorchFacts:
        if isinstance(self.installed, ImportError):
            raise self.installed
        return self.installed

    def nccl_files(self) -> tuple[NcclFile, ...]:
        return self.nccl

    def cuda(self) -> CudaFacts | None:
        return self.driver

    def all_reduce(self, timeout_s: float) -> float:
        assert 0 < timeout_s <= 60
        if isinstance(self.total, Exception):
            raise self.total
        return self.total


def found(check: Check, name: str, machine: FakeMachine) -> Finding:
    return examine(machine, checks=[check]).named(name)


# -- whole machines --------------------------------------------------------------------------


def test_a_machine_with_eight_gpus_is_healthy_and_nothing_is_missing() -> None:
    report = examine(FakeMachine())
    assert report.is_healthy
    assert [f for f in report.findings if f.status == "missing"] == []
    assert report.named("cuda.peer_access").value == "each of the 8 devices reaches all others"
    assert report.named("cuda.nvlink").value == "8 devices, each 18 active, 18 to an NVSwitch"


def test_a_laptop_is_healthy_and_says_that_it_has_no_gpu() -> None:
    laptop = FakeMachine(installed=CPU_TORCH, driver=None, nccl=(), wheels={}, modules={})
    report = examine(laptop)
    assert report.is_healthy
    # One line for all that is asked of GPUs, and nothing of one that is not there.
    devices = [f for f in report.findings if f.name.startswith("cuda.") and f.name != "cuda.driver"]
    (finding,) = devices
    assert (finding.name, finding.status) == ("cuda.devices", "missing")
    assert finding.value == "no GPU: 4 checks of links between GPUs left out"
    assert report.named("symmetric_memory").value == "no CUDA device"
    assert "CPU build" in report.named("nccl").reason


def test_a_broken_torch_leaves_the_other_checks_running() -> None:
    report = examine(FakeMachine(installed=ImportError("undefined symbol: ncclCommFoo")))
    assert not report.is_healthy
    assert "ncclCommFoo" in report.named("torch").reason
    assert report.named("nccl").value == "not measured"
    assert report.named("symmetric_memory").value == "not measured"
    assert report.named("cuda.driver").status == "ok"


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def check_nothing(probe: MachineProbe) -> list[Finding]:
        raise ZeroDivisionError("by zero")

    report = examine(FakeMachine(), checks=[check_nothing, checks.check_process])
    assert "ZeroDivisionError: by zero" in report.named("check_nothing").reason
    assert report.named("python").status == "ok"


# -- host and software -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "total", "status"),
    [(8 * 2**20, 64 * 2**20, "broken"), (60 * 2**20, 64 * 2**20, "info"), (GIB, 2 * GIB, "ok")],
)
def test_shared_memory_is_judged_by_what_is_free(free: int, total: int, status: str) -> None:
    facts = replace(HOST, shared_memory_bytes=total, shared_memory_free_bytes=free)
    finding = found(checks.check_shared_memory, "shared_memory", FakeMachine(facts=facts))
    assert finding.status == status
    assert ("--shm-size" in finding.fix) == (status != "ok")


def test_few_open_files_come_with_the_command_to_raise_them() -> None:
    machine = FakeMachine(facts=replace(HOST, open_files=1024))
    finding = found(checks.check_open_files, "open_files", machine)
    assert (finding.status, finding.value) == ("info", "limit 1,024")
    assert "ulimit -n 4096" in finding.fix


@pytest.mark.parametrize(("limit", "status"), [(4095, "info"), (4096, "ok")])
def test_how_many_open_files_are_few(limit: int, status: str) -> None:
    machine = FakeMachine(facts=replace(HOST, open_files=limit))
    assert found(checks.check_open_files, "open_files", machine).status == status


def test_what_a_system_does_not_tell_is_not_guessed() -> None:
    unknown = HostFacts("3.12.1 CPython", "Darwin", 8, None, None, None, None)
    report = examine(FakeMachine(facts=unknown))
    assert report.is_healthy
    assert report.named("memory").value == "not known"
    assert report.named("shared_memory").status == "missing"
    assert report.named("open_files").value == "limit not known"


def test_torch_without_distributed_or_gloo_is_broken() -> None:
    without = replace(CPU_TORCH, is_distributed=False, backends={})
    machine = FakeMachine(installed=without)
    assert found(checks.check_torch, "torch.distributed", machine).status == "broken"
    without = replace(CPU_TORCH, backends={"gloo": False, "nccl": True, "mpi": False})
    finding = found(checks.check_torch, "torch.distributed", FakeMachine(installed=without))
    assert (finding.status, finding.value) == ("broken", "gloo: no, nccl: yes, mpi: no")


def test_triton_without_its_interpreter() -> None:
    machine = FakeMachine(modules={"triton": "3.6.0"})
    assert found(checks.check_triton, "triton", machine).value == "3.6.0"
    assert found(checks.check_triton, "triton.interpreter", machine).status == "missing"
    missing = found(checks.check_triton, "triton", FakeMachine(modules={}))
    assert "No module named 'triton'" in missing.reason
    assert "pip install 'triton>=3.6'" in missing.fix


def test_packages_of_pcomm_are_listed_and_others_are_not() -> None:
    machine = FakeMachine(wheels={"pcomm-nvls": "0.2.0", "pcomm-core": "0.1.0", "numpy": "2"})
    findings = examine(machine, checks=[checks.check_packages]).findings
    assert [(f.name, f.value) for f in findings] == [
        ("pcomm-core", "0.1.0"),
        ("pcomm-nvls", "0.2.0"),
    ]


def test_variables_that_matter_are_shown_with_what_they_cost() -> None:
    variables = {
        "NCCL_P2P_DISABLE": "1",
        "TORCH_LOGS": "+dynamo",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PCOMM_LOG": "debug",
        "HOME": "/root",
        "MY_NCCL_": "x",
    }
    report = examine(FakeMachine(variables=variables), checks=[checks.check_variables])
    assert [f.name for f in report.findings] == [
        "$CUDA_VISIBLE_DEVICES",
        "$GLOO_SOCKET_IFNAME",
        "$NCCL_P2P_DISABLE",
        "$OMP_NUM_THREADS",
        "$PCOMM_LOG",
        "$TORCH_LOGS",
    ]
    assert "NVLink" in report.named("$NCCL_P2P_DISABLE").reason
    assert "No GPU is visible" in report.named("$CUDA_VISIBLE_DEVICES").reason
    assert report.named("$GLOO_SOCKET_IFNAME").reason == ""


def test_a_misspelt_variable_of_pcomm_is_broken() -> None:
    machine = FakeMachine(variables={"PCOMM_TIMOUT_S": "5"})
    finding = found(checks.check_variables, "variables", machine)
    assert finding.status == "broken"
    assert "PCOMM_TIMEOUT_S" in finding.fix


# -- NCCL ------------------------------------------------------------------------------------


def test_one_nccl_is_ok_and_its_versions_are_told() -> None:
    report = examine(FakeMachine(), checks=[checks.check_nccl])
    assert [f.status for f in report.findings] == ["ok", "ok", "ok"]
    assert report.named("nccl").value == "torch was built with 2.29.3, loaded 2.29.3+cuda13.0"


@pytest.mark.parametrize(
    ("torch", "fix"),
    [
        (CUDA_TORCH, "pip install nvidia-nccl-cu13==2.29.3"),
        (replace(CUDA_TORCH, cuda="12.8"), "pip install nvidia-nccl-cu12==2.27.5"),
        (CPU_TORCH, "then install torch again"),
        (ImportError("undefined symbol"), "then install torch again"),
    ],
    ids=["cu13", "cu12", "cpu", "broken"],
)
def test_two_nccl_wheels_are_broken(torch: TorchFacts | ImportError, fix: str) -> None:
    wheels = {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.29.3"}
    machine = FakeMachine(installed=torch, wheels=wheels)
    finding = found(checks.check_nccl, "nccl.wheels", machine)
    assert finding.status == "broken"
    assert "nvidia/nccl/" in finding.reason
    assert "pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13" in finding.fix
    assert fix in finding.fix


def test_a_wheel_for_another_cuda_is_broken() -> None:
    finding = found(
        checks.check_nccl, "nccl.wheels", FakeMachine(wheels={"nvidia-nccl-cu12": "2.27.5"})
    )
    assert finding.status == "broken"
    assert "CUDA 13.0" in finding.reason
    assert "pip uninstall -y nvidia-nccl-cu12" in finding.fix


def test_nccl_found_twice_is_told_and_loaded_twice_is_broken() -> None:
    twice = found(checks.check_nccl, "nccl.libraries", FakeMachine(nccl=(WHEEL, SYSTEM)))
    assert twice.status == "info"
    assert WHEEL.path in twice.value
    assert SYSTEM.path in twice.value
    assert f"Found 2 times; {WHEEL.path} is the one loaded" in twice.reason
    both = (WHEEL, replace(SYSTEM, is_loaded=True))
    assert found(checks.check_nccl, "nccl.libraries", FakeMachine(nccl=both)).status == "broken"


def test_version_of_a_library_is_read_from_its_text(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    text = b"\0NCCL version %d.%d\0NCCL version 2.27.5+cuda12.9\0NCCL version 2.27.5 compiled\0"
    library.write_bytes(b"\x7fELF" + bytes(5000) + text)
    assert nccl_version(library) == "2.27.5+cuda12.9"
    library.write_bytes(b"\x7fELF")
    assert nccl_version(library) is None


def test_libraries_on_this_machine_are_found_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").write_bytes(b"NCCL version 2.1.2+cuda9.0\0")
    (folder / "libnccl.so").symlink_to("libnccl.so.2")
    (folder / "libnccl-net.so").write_bytes(b"a plugin")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder}:/no/such/folder")
    ours = [f for f in ThisMachine().nccl_files() if f.path.startswith(str(tmp_path))]
    path = str((folder / "libnccl.so.2").resolve())
    assert ours == [NcclFile(path, "wheel", "2.1.2+cuda9.0", False)]


# -- GPUs ------------------------------------------------------------------------------------


def test_a_gpu_behind_a_cpu_build_of_torch_says_what_to_install() -> None:
    finding = found(checks.check_gpus, "cuda.driver", FakeMachine(installed=CPU_TORCH))
    assert finding.status == "missing"
    assert "CPU build" in finding.reason
    assert "pip install" in finding.fix


def test_a_driver_older_than_torch_is_broken() -> None:
    old = FakeMachine(driver=CudaFacts("550.54", (12, 4), devices(1)))
    finding = found(checks.check_gpus, "cuda.driver", old)
    assert finding.status == "broken"
    assert "built for CUDA 13.0" in finding.reason
    assert "CUDA 12" in finding.fix
    # Within one major version a newer torch runs on an older driver.
    minor = FakeMachine(installed=replace(CUDA_TORCH, cuda="13.2"))
    assert found(checks.check_gpus, "cuda.driver", minor).status == "ok"


@pytest.mark.parametrize(
    ("code", "status", "advice"),
    [(802, "broken", "nvidia-fabricmanager"), (4242, "broken", "nvidia-smi"), (100, "missing", "")],
)
def test_a_driver_that_does_not_start(code: int, status: str, advice: str) -> None:
    machine = FakeMachine(driver=CudaFacts("580.82", None, (), "the driver's words", code))
    report = examine(machine, checks=[checks.check_gpus])
    driver = report.named("cuda.driver")
    assert driver.status == status
    assert "the driver's words" in driver.reason
    assert advice in driver.fix
    assert report.named("cuda.devices").value.startswith("no GPU: ")


def test_a_driver_that_shows_no_device() -> None:
    finding = found(
        checks.check_gpus, "cuda.driver", FakeMachine(driver=CudaFacts("580.82", (13, 0), ()))
    )
    assert finding.status == "missing"
    assert "CUDA_VISIBLE_DEVICES" in finding.fix


def test_one_gpu_alone_is_not_said_to_have_peers_or_tried_multicast() -> None:
    report = examine(FakeMachine(driver=CudaFacts("580.82", (13, 0), devices(1))))
    device = report.named("cuda.device.0").value
    assert device == "NVIDIA H100, compute capability 9.0, 80.0 GiB"
    assert report.named("cuda.peer_access").status == "info"
    assert "not measured" in report.named("cuda.multicast").reason
    assert report.named("cuda.nvlink").value == "device 0: 18 active, 18 to an NVSwitch"


def test_pairs_without_peer_access_are_written_out() -> None:
    pairs = devices(4)
    pairs = tuple(
        replace(device, peers=frozenset({number ^ 1})) for number, device in enumerate(pairs)
    )
    machine = FakeMachine(driver=CudaFacts("580.82", (13, 0), pairs))
    finding = found(checks.check_gpus, "cuda.peer_access", machine)
    assert finding.status == "missing"
    assert finding.value.splitlines()[2] == "device 2 reaches device 3"
    # One direction is not enough.
    lame = (*devices(2)[:1], replace(devices(2)[1], peers=frozenset()))
    machine = FakeMachine(driver=CudaFacts("580.82", (13, 0), lame))
    finding = found(checks.check_gpus, "cuda.peer_access", machine)
    assert finding.value == "device 0 reaches device 1\ndevice 1 reaches none"


@pytest.mark.parametrize(
    ("changes", "name", "status", "value"),
    [
        ({"has_multicast": False}, "cuda.multicast", "missing", "not on devices 0, 1"),
        ({"has_multicast": None}, "cuda.multicast", "info", "not measured"),
        ({"nvlinks": 0, "nvlinks_to_switch": 0}, "cuda.nvlink", "missing", "none"),
        ({"nvlinks": None, "nvlinks_to_switch": None}, "cuda.nvlink", "info", "not measured"),
        ({"is_mig": True}, "cuda.mig", "info", "on for devices 0, 1"),
        ({"is_mig": None}, "cuda.mig", "info", "not measured"),
    ],
)
def test_what_devices_lack(changes: dict[str, Any], name: str, status: str, value: str) -> None:
    machine = FakeMachine(driver=CudaFacts("580.82", (13, 0), devices(2, **changes)))
    finding = found(checks.check_gpus, name, machine)
    assert (finding.status, finding.value) == (status, value)
    assert finding.reason


def test_a_device_with_fewer_links_than_the_others_is_told() -> None:
    two = devices(2)
    machine = FakeMachine(
        driver=CudaFacts("580.82", (13, 0), (two[0], replace(two[1], nvlinks=17)))
    )
    finding = found(checks.check_gpus, "cuda.nvlink", machine)
    assert "device 1: 17 active" in finding.value
    assert "some may be down" in finding.reason


def test_symmetric_memory_is_never_said_to_work() -> None:
    finding = found(checks.check_symmetric_memory, "symmetric_memory", FakeMachine())
    assert (finding.status, finding.value) == ("info", "torch has CUDA; not measured")
    machine = FakeMachine(installed=replace(CUDA_TORCH, symmetric_memory_error="ImportError: x"))
    finding = found(checks.check_symmetric_memory, "symmetric_memory", machine)
    assert (finding.status, finding.reason) == ("missing", "ImportError: x")


# -- self-test and report --------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "words"),
    [(TimeoutError("2 ranks hung\nstack"), "Error: 2 ranks hung"), (4.0, "came back as 4")],
)
def test_ranks_that_cannot_add_are_broken(total: float | Exception, words: str) -> None:
    machine = FakeMachine(total=total)
    finding = found(self_test.check_all_reduce, "self_test.all_reduce", machine)
    assert finding.status == "broken"
    assert words in finding.reason
    assert "stack" not in finding.reason


def test_a_broken_finding_needs_a_reason_and_a_fix() -> None:
    with pytest.raises(AssertionError, match="nccl"):
        Finding("nccl", "broken", "two", "because")


def test_text_is_aligned_within_100_columns_and_names_what_is_broken_last() -> None:
    long = "a sentence that goes on " * 12
    report = MachineReport(
        (
            Finding("python", "ok", "3.12"),
            Finding("nccl.libraries", "info", "/one\n/two", "Found twice."),
            Finding("a.rather.long.name.of.a.finding", "broken", long, long, "Mend it."),
        )
    )
    lines = report.as_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "ok       python                   3.12"
    indent = lines[0].index("3.12")
    assert lines[1].index("/one") == lines[2].index("/two") == lines[3].index("Found") == indent
    assert " " * indent + "fix: Mend it." in lines
    assert lines[-2] == "1 ok, 0 missing, 1 broken, 1 info"
    assert lines[-1] == "broken: a.rather.long.name.of.a.finding"


def test_json_holds_every_part_of_every_finding() -> None:
    report = examine(FakeMachine(total=4.0))
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["is_healthy"] is False
    assert [Finding(**finding) for finding in plain["findings"]] == list(report.findings)


def test_this_machine_answers_every_check_but_the_self_test() -> None:
    quick = [check for check in CHECKS if check is not self_test.check_all_reduce]
    report = examine(checks=quick)
    assert [f for f in report.findings if "itself failed" in f.value] == []
    assert report.named("python").value.startswith(sys.version.split()[0])
    assert report.named("torch").status == "ok"
    assert report.named("pcomm-core").status == "ok"
