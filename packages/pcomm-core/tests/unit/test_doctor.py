"""The doctor on described machines: what it calls ok, missing and broken, and what it advises."""

from __future__ import annotations

import functools
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from pcomm.core.doctor import checks
from pcomm.core.doctor import command as self_test
from pcomm.core.doctor.command import CHECKS, GROUP, Check, examine, installed_checks
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
from pcomm.core.doctor.this_machine import ThisMachine, limits_of_group, nccl_version

GIB = 2**30

HOST = HostFacts(
    *("3.12.1 CPython", "Linux", 8, 64 * GIB, 32 * GIB, 31 * GIB, 65536),
    name="node1",
    addresses=("10.0.0.1",),
)
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


def with_host(**facts: Any) -> FakeMachine:
    return FakeMachine(facts=replace(HOST, **facts))


def with_shared(free_mib: int, total_mib: int) -> FakeMachine:
    return with_host(
        shared_memory_bytes=total_mib * 2**20, shared_memory_free_bytes=free_mib * 2**20
    )


def with_gpus(gpus: tuple[DeviceFacts, ...], error: str = "", code: int = 0) -> FakeMachine:
    return FakeMachine(driver=CudaFacts("580.82", None if code else (13, 0), gpus, error, code))


def with_torch(installed: TorchFacts | ImportError = CUDA_TORCH, **changes: Any) -> FakeMachine:
    changed = replace(installed, **changes) if isinstance(installed, TorchFacts) else installed
    return FakeMachine(installed=changed)


def with_two_wheels(installed: TorchFacts | ImportError) -> FakeMachine:
    wheels = {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.29.3"}
    return FakeMachine(installed=installed, wheels=wheels)


WITHOUT_GLOO = {"gloo": False, "nccl": True, "mpi": False}
TWO_WHEELS = ["nvidia/nccl/", "pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13"]
AGAIN = [*TWO_WHEELS, "then install torch again"]
NOT_MEASURED = "info", ["not measured"]
OLD_DRIVER = CudaFacts("550.54", (12, 4), devices(1))
PAIRS = tuple(replace(d, peers=frozenset({n ^ 1})) for n, d in enumerate(devices(4)))
# One direction is not enough.
LAME = (devices(2)[0], replace(devices(2)[1], peers=frozenset()))
FEWER_LINKS = (devices(2)[0], replace(devices(2)[1], nvlinks=17))
ULIMIT = ["limit 4,095", "ulimit -n 4096"]

# Check, finding and machine; its status, and words of its value, reason and fix.
FINDINGS: list[tuple[Check, str, FakeMachine, str, list[str]]] = [
    (checks.check_shared_memory, "shared_memory", with_shared(8, 64), "broken", ["--shm-size"]),
    (checks.check_shared_memory, "shared_memory", with_shared(60, 64), "info", ["--shm-size"]),
    (checks.check_shared_memory, "shared_memory", with_shared(1024, 2048), "ok", []),
    (checks.check_open_files, "open_files", with_host(open_files=4095), "info", ULIMIT),
    (checks.check_open_files, "open_files", with_host(open_files=4096), "ok", []),
    *(
        (checks.check_process, name, with_host(**facts), "info", words)
        for name, facts, words in (
            ("cores", {"core_limit": 1.5}, ["8 usable", "time of 1.5", "OMP_NUM_THREADS=1 "]),
            ("memory", {"memory_limit_bytes": 2 * GIB}, ["64.0 GiB, of which 2.0 GiB"]),
        )
    ),
    *(
        (checks.check_host_name, "host", with_host(addresses=found), status, words)
        for found, status, words in (
            (("10.0.0.1", "fe80::1%eth0"), "ok", ["node1, 10.0.0.1, fe80::1%eth0"]),
            (("127.0.1.1", "10.0.0.1"), "info", ["node1, 127.0.1.1", "GLOO_SOCKET_IFNAME"]),
            (("::1",), "info", ["which other hosts do not reach"]),
            ((), "info", ["no address", "GLOO_SOCKET_IFNAME"]),
        )
    ),
    *(
        (checks.check_torch, "torch.instructions", with_torch(instructions=sets), "info", words)
        for sets, words in (
            (("AVX2", "AVX-512", "AMX"), ["AVX2, AVX-512, AMX", "number of rows"]),
            ((), ["none that torch asks for"]),
        )
    ),
    (
        *(checks.check_variables, "$ONEDNN_MAX_CPU_ISA"),
        *(FakeMachine(variables={"ONEDNN_MAX_CPU_ISA": "AVX2"}), "info", ["AVX2"]),
    ),
    *(
        (checks.check_torch, "torch.distributed", with_torch(**changes), "broken", words)
        for changes, words in (
            ({"is_distributed": False, "backends": {}}, []),
            ({"backends": WITHOUT_GLOO}, ["gloo: no, nccl: yes, mpi: no"]),
        )
    ),
    *(
        (checks.check_triton, name, FakeMachine(modules=modules), status, words)
        for name, modules, status, words in (
            ("triton", {"triton": "3.6.0"}, "ok", ["3.6.0"]),
            ("triton.interpreter", {"triton": "3.6.0"}, "missing", []),
            ("triton", {}, "missing", ["No module named 'triton'", "pip install 'triton>=3.6'"]),
        )
    ),
    (
        *(checks.check_variables, "variables", FakeMachine(variables={"PCOMM_TIMOUT_S": "5"})),
        *("broken", ["PCOMM_TIMEOUT_S"]),
    ),
    *(
        (checks.check_nccl, "nccl.wheels", machine, "broken", words)
        for machine, words in (
            (with_two_wheels(CUDA_TORCH), [*TWO_WHEELS, "pip install nvidia-nccl-cu13==2.29.3"]),
            (
                with_two_wheels(replace(CUDA_TORCH, cuda="12.8")),
                [*TWO_WHEELS, "pip install nvidia-nccl-cu12==2.27.5"],
            ),
            (with_two_wheels(CPU_TORCH), AGAIN),
            (with_two_wheels(ImportError("undefined symbol")), AGAIN),
            (
                FakeMachine(wheels={"nvidia-nccl-cu12": "2.27.5"}),
                ["CUDA 13.0", "pip uninstall -y nvidia-nccl-cu12"],
            ),
        )
    ),
    *(
        (checks.check_nccl, "nccl.libraries", FakeMachine(nccl=(WHEEL, other)), status, words)
        for other, status, words in (
            (SYSTEM, "info", [SYSTEM.path, f"Found 2 times; {WHEEL.path} is the one loaded"]),
            (replace(SYSTEM, is_loaded=True), "broken", []),
        )
    ),
    *(
        (checks.check_gpus, "cuda.driver", machine, status, words)
        for machine, status, words in (
            (with_torch(CPU_TORCH), "missing", ["CPU build", "pip install"]),
            (FakeMachine(driver=OLD_DRIVER), "broken", ["built for CUDA 13.0", "CUDA 12"]),
            # Within one major version a newer torch runs on an older driver.
            (with_torch(cuda="13.2"), "ok", []),
            (with_gpus(()), "missing", ["CUDA_VISIBLE_DEVICES"]),
            (with_gpus((), "its words", 802), "broken", ["its words", "nvidia-fabricmanager"]),
            (with_gpus((), "its words", 4242), "broken", ["its words", "nvidia-smi"]),
            (with_gpus((), "its words", 100), "missing", ["its words"]),
        )
    ),
    *(
        (checks.check_gpus, f"cuda.{name}", with_gpus(gpus), status, words)
        for name, gpus, status, words in (
            ("peer_access", PAIRS, "missing", ["\ndevice 2 reaches device 3\n"]),
            (
                *("peer_access", LAME, "missing"),
                ["device 0 reaches device 1\ndevice 1 reaches none"],
            ),
            ("multicast", devices(2, has_multicast=False), "missing", ["not on devices 0, 1"]),
            ("multicast", devices(2, has_multicast=None), *NOT_MEASURED),
            ("nvlink", devices(2, nvlinks=0, nvlinks_to_switch=0), "missing", ["none"]),
            ("nvlink", devices(2, nvlinks=None, nvlinks_to_switch=None), *NOT_MEASURED),
            ("nvlink", FEWER_LINKS, "info", ["device 1: 17 active", "some may be down"]),
            ("mig", devices(2, is_mig=True), "info", ["on for devices 0, 1"]),
            ("mig", devices(2, is_mig=None), *NOT_MEASURED),
        )
    ),
    # Symmetric memory is never said to work.
    *(
        (checks.check_symmetric_memory, "symmetric_memory", machine, status, words)
        for machine, status, words in (
            (FakeMachine(), "info", ["torch has CUDA; not measured"]),
            (with_torch(symmetric_memory_error="ImportError: x"), "missing", ["ImportError: x"]),
        )
    ),
    *(
        (self_test.check_all_reduce, "self_test.all_reduce", machine, "broken", words)
        for machine, words in (
            (FakeMachine(total=TimeoutError("2 ranks hung\nstack")), ["Error: 2 ranks hung"]),
            (FakeMachine(total=4.0), ["came back as 4"]),
        )
    ),
]


@pytest.mark.parametrize(("check", "name", "machine", "status", "words"), FINDINGS)
def test_what_is_found_and_advised(
    check: Check, name: str, machine: FakeMachine, status: str, words: list[str]
) -> None:
    finding = examine(machine, checks=[check]).named(name)
    assert finding.status == status
    told = f"{finding.value}\n{finding.reason}\n{finding.fix}"
    assert [word for word in words if word not in told] == []
    assert status != "ok" or not finding.fix
    # Nothing of the stack of a rank.
    assert "stack" not in told


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


def test_what_a_system_does_not_tell_is_not_guessed() -> None:
    unknown = HostFacts("3.12.1 CPython", "Darwin", 8, None, None, None, None)
    report = examine(FakeMachine(facts=unknown))
    assert report.is_healthy
    assert report.named("memory").value == "not known"
    assert report.named("shared_memory").status == "missing"
    assert report.named("open_files").value == "limit not known"
    assert report.named("host").value == "not known"
    # A limit above what there is limits nothing.
    free = with_host(core_limit=8.0, memory_limit_bytes=64 * GIB)
    found = examine(free, checks=[checks.check_process])
    assert found.named("cores").value == "8 usable by this process"
    assert found.named("memory").value == "64.0 GiB"


def test_limits_of_a_container_are_those_of_the_tightest_group(tmp_path: Path) -> None:
    own, inner = tmp_path / "own", tmp_path / "root" / "job" / "task"
    inner.mkdir(parents=True)
    limits = functools.partial(limits_of_group, tmp_path / "root", own)
    assert limits() == (None, None)
    own.write_text("0::/job/task\n")
    assert limits() == (None, None)
    for group, cores, size in (
        (inner, "max 100000", "max"),
        (inner.parent, "150000 100000", "4096"),
        (tmp_path / "root", "400000 100000", "8192"),
        # Not a group of this process.
        (tmp_path, "1000 100000", "1"),
    ):
        (group / "cpu.max").write_text(f"{cores}\n")
        (group / "memory.max").write_text(f"{size}\n")
    assert limits() == (1.5, 4096)
    own.write_text("3:cpu:/job\n")
    assert limits() == (None, None)


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


def test_one_nccl_is_ok_and_its_versions_are_told() -> None:
    report = examine(FakeMachine(), checks=[checks.check_nccl])
    assert [f.status for f in report.findings] == ["ok", "ok", "ok"]
    assert report.named("nccl").value == "torch was built with 2.29.3, loaded 2.29.3+cuda13.0"


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


def test_one_gpu_alone_is_not_said_to_have_peers_or_tried_multicast() -> None:
    report = examine(FakeMachine(driver=CudaFacts("580.82", (13, 0), devices(1))))
    device = report.named("cuda.device.0").value
    assert device == "NVIDIA H100, compute capability 9.0, 80.0 GiB"
    assert report.named("cuda.peer_access").status == "info"
    assert "not measured" in report.named("cuda.multicast").reason
    assert report.named("cuda.nvlink").value == "device 0: 18 active, 18 to an NVSwitch"


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
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT" or (
        "AVX2" in report.named("torch.instructions").value
    )
    assert socket.gethostname() in report.named("host").value
    assert report.named("pcomm-core").status == "ok"


def test_checks_of_other_packages_run_once_each_and_one_that_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [
        EntryPoint("nvls", "pcomm.core.doctor.checks:check_process", GROUP),
        EntryPoint("nvls", "pcomm.core.doctor.checks:check_process", GROUP),
        EntryPoint("absent", "pcomm.core.doctor.nowhere:check", GROUP),
        EntryPoint("odd", "pcomm.core.doctor.checks:_MIB", GROUP),
        EntryPoint("nvls", "pcomm.core.doctor.checks:check_open_files", "another group"),
    ]
    monkeypatch.setattr(
        self_test, "entry_points", lambda group: EntryPoints(entries).select(group=group)
    )
    report = examine(checks=installed_checks())
    names = [finding.name for finding in report.findings]
    assert names == ["absent", "python", "platform", "cores", "memory", "odd"]
    assert "ModuleNotFoundError" in report.named("absent").reason
    assert "uninstall" in report.named("absent").fix
    assert "not callable" in report.named("odd").reason
    entries.clear()
    assert installed_checks() == []
