"""`pcomm doctor`: runs all checks and a self-test of ranks, and prints what was found."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from pcomm.core.doctor import checks
from pcomm.core.doctor.report import Finding, MachineProbe, MachineReport
from pcomm.core.doctor.this_machine import ThisMachine
from pcomm.core.errors import PcommError

__all__ = [
    "CHECKS",
    "GROUP",
    "Check",
    "check_all_reduce",
    "command",
    "examine",
    "installed_checks",
]


# Starting two processes that import torch takes most of it; a machine that is busy takes longer.
_TIMEOUT_S = 30.0
# Of the all-reduce between the ranks of a job; it is repeated for the median.
_MIB, _REPEATS = 4, 5
_COMPARED = ("torch", "triton", "numpy")


def check_all_reduce(probe: MachineProbe) -> Iterable[Finding]:
    """All-reduce between two local ranks, within a deadline."""
    name = "self_test.all_reduce"
    fix = "Set GLOO_SOCKET_IFNAME to an interface that is up, such as lo; check the host's name."
    try:
        total = probe.all_reduce(_TIMEOUT_S)
    except Exception as error:
        # A rank's report goes on with tracebacks, which do not fit into a table.
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
        yield Finding(name, "broken", "two local ranks could not add over gloo", reason, fix)
        return
    if total != 3.0:
        reason = f"1 + 2 over two ranks came back as {total:g}."
        fix = "Install torch again; a wrong sum is a fault of the build or of the machine."
        yield Finding(name, "broken", "wrong result", reason, fix)
    else:
        yield Finding(name, "ok", "two local ranks added over gloo")


def _check_job(probe: MachineProbe, report: MachineReport) -> list[Finding]:
    """Have the ranks of this job meet. Collective: all processes of the launcher call it.

    A rank that does not come is named after `PCOMM_TIMEOUT_S` seconds.

    Args:
        probe: Source of the versions.
        report: Findings of this rank on its own machine.

    Returns:
        Findings that are equal on all ranks: each rank with its host and interface, versions that
        differ, and time and rate of an all-reduce. One that is broken, if they do not meet.
    """
    try:
        return _findings(_met(probe, report))
    except PcommError as error:
        value = f"{error.asked}: {error.found}"
        return [Finding("job.ranks", "broken", value, error.why, error.fix)]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        fix = "Read the report of rank 0, or start rank 0 where MASTER_ADDR and MASTER_PORT say."
        return [Finding("job.ranks", "broken", "rank 0 does not answer", reason, fix)]


def _met(probe: MachineProbe, report: MachineReport) -> list[Mapping[str, Any]]:
    """What each rank tells of itself and of an all-reduce, in the order of the ranks."""
    import torch
    import torch.distributed as dist

    from pcomm.core.process.world import connect, unconnected_control

    # First without connections between them, where a rank that is missing can be named.
    arrival = unconnected_control()
    arrival.vote("doctor: arrival", 0)
    # The store lives in rank 0, which keeps it until all have left.
    with connect(backend="gloo", device="cpu") as world:
        x = torch.ones(_MIB << 18)
        times_s = []
        for _ in range(1 + _REPEATS):
            dist.barrier()
            start_s = time.perf_counter()
            dist.all_reduce(x)
            times_s.append(time.perf_counter() - start_s)
        told = {
            "host": socket.gethostname(),
            "interface": _interface(),
            "versions": _versions(probe),
            "broken": [f.name for f in report.findings if f.status == "broken"],
            "is_right": bool((x == float(world.size) ** (1 + _REPEATS)).all()),
            # The first one also makes buffers.
            "time_s": statistics.median(times_s[1:]),
        }
        said = world.control.vote("doctor", 0, json.dumps(told))
        return [json.loads(text) for text in said.reasons]


def _interface() -> str:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    with suppress(OSError):
        return chosen or socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _versions(probe: MachineProbe) -> dict[str, str]:
    found = {n: v for n, v in probe.distributions().items() if n.startswith("pcomm-")}
    for name in _COMPARED:
        with suppress(ImportError):
            found[name] = probe.module_version(name)
    return found | {"python": ".".join(probe.host().python.split(".")[:2])}


def _findings(ranks: list[Mapping[str, Any]]) -> list[Finding]:
    found = []
    for rank, told in enumerate(ranks):
        name, value = f"job.rank.{rank}", f"{told['host']}, {told['interface']}"
        if told["broken"]:
            reason = "On its machine these are broken: " + ", ".join(told["broken"]) + "."
            fix = f"Run `pcomm doctor` alone on {told['host']}, and mend what it names."
            found.append(Finding(name, "broken", value, reason, fix))
        else:
            found.append(Finding(name, "ok", value))
    differing = []
    for package in sorted({name for told in ranks for name in told["versions"]}):
        having: dict[str, list[int]] = {}
        for rank, told in enumerate(ranks):
            having.setdefault(told["versions"].get(package, "none"), []).append(rank)
        if len(having) > 1:
            each = (f"{version} on {', '.join(map(str, at))}" for version, at in having.items())
            differing.append(f"{package}: {'; '.join(each)}")
    if differing:
        reason = "\n".join(differing)
        fix = "Install the same versions on all hosts."
        found.append(Finding("job.versions", "broken", "differ between ranks", reason, fix))
    else:
        found.append(Finding("job.versions", "ok", "the same on all ranks"))
    time_s = max(told["time_s"] for told in ranks)
    rate = 2 * (len(ranks) - 1) / len(ranks) * (_MIB << 20) / time_s / 1e9
    value = f"{_MIB} MiB on {len(ranks)} ranks over gloo in {time_s * 1e3:.1f} ms, {rate:.2f} GB/s"
    if all(told["is_right"] for told in ranks):
        found.append(Finding("job.all_reduce", "ok", value))
    else:
        wrong = ", ".join(str(rank) for rank, told in enumerate(ranks) if not told["is_right"])
        fix = "Install torch again; a wrong sum is a fault of the build or of the machine."
        found.append(Finding("job.all_reduce", "broken", value, f"Wrong on {wrong}.", fix))
    return found


GROUP = "pcomm.doctor"
"""Entry points of further checks: each names a `Check`."""

Check = Callable[[MachineProbe], Iterable[Finding]]

CHECKS: Final[tuple[Check, ...]] = (
    checks.check_process,
    checks.check_host_name,
    checks.check_shared_memory,
    checks.check_open_files,
    checks.check_packages,
    checks.check_torch,
    checks.check_triton,
    checks.check_nccl,
    checks.check_gpus,
    checks.check_symmetric_memory,
    checks.check_variables,
    check_all_reduce,
)


def examine(
    probe: MachineProbe | None = None, *, checks: Iterable[Check] = CHECKS
) -> MachineReport:
    """Look at this machine and say what it can do for pcomm, and why not.

    Takes no GPU memory and creates no CUDA context. The last check starts two processes for a
    moment. A check that fails itself is reported as broken, and the others still run.

    Args:
        probe: Source of the facts; this machine if absent.
        checks: Checks to run, in this order.
    """
    where = ThisMachine() if probe is None else probe
    return MachineReport(tuple(finding for check in checks for finding in _run(check, where)))


def installed_checks() -> list[Check]:
    """The checks that other installed packages bring. Local; each is imported when it runs."""
    # One distribution is found twice where its source folder is on the path as well.
    entries = {entry.value: entry for entry in entry_points(group=GROUP)}
    return [_imported(entry) for entry in sorted(entries.values(), key=lambda entry: entry.name)]


def _imported(entry: EntryPoint) -> Check:
    def check(probe: MachineProbe) -> Iterable[Finding]:
        try:
            found: Check = entry.load()
        except (ImportError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            fix = f"Install the package that brings {entry.value} again, or uninstall it."
            return [Finding(entry.name, "broken", "its check cannot be imported", reason, fix)]
        return found(probe)

    # What the report calls it if it fails.
    check.__name__ = entry.name
    return check


def _run(check: Check, probe: MachineProbe) -> list[Finding]:
    try:
        return list(check(probe))
    except Exception as error:
        name = getattr(check, "__name__", "check")
        reason = f"{type(error).__name__}: {error}"
        fix = "This is a mistake in pcomm: report it with this line."
        return [Finding(name, "broken", "the check itself failed", reason, fix)]


class DoctorCommand:
    """See `pcomm.core.cli.Command`."""

    name = "doctor"
    help = "what this machine can do for pcomm, and why not"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--no-self-test",
            action="store_true",
            help="do not start the two local ranks that add two numbers, nor have those of a "
            "launcher meet",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report; 1 if something is broken, else 0.

        Under a launcher the ranks of the job meet: rank 0 prints its report with what they found
        together, and all return the same.
        """
        size = os.environ.get("WORLD_SIZE", "")
        is_job = size.isdecimal() and int(size) > 1
        skipped = {check_all_reduce} if arguments.no_self_test or is_job else set()
        chosen = [check for check in CHECKS if check not in skipped]
        report = examine(checks=[*chosen, *installed_checks()])
        if is_job and not arguments.no_self_test:
            together = _check_job(ThisMachine(), report)
            report = MachineReport((*report.findings, *together))
            if os.environ.get("RANK") != "0":
                if together[0].name == "job.ranks":
                    # Rank 0 may be the one that is missing.
                    print(MachineReport(tuple(together)).as_text(), file=sys.stderr)
                return 0 if report.is_healthy else 1
        print(json.dumps(report.as_dict(), indent=2) if arguments.json else report.as_text())
        return 0 if report.is_healthy else 1


command = DoctorCommand()
