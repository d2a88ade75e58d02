"""Runs every check; the library call behind `pcomm doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from pcomm.core.doctor import gpu, host, nccl, self_test, software
from pcomm.core.doctor.probe import Probe
from pcomm.core.doctor.report import Finding, Report
from pcomm.core.doctor.this_machine import ThisMachine

__all__ = ["CHECKS", "GROUP", "Check", "examine", "installed_checks"]

GROUP = "pcomm.doctor"
"""Entry points of further checks: each names a `Check`."""

Check = Callable[[Probe], Iterable[Finding]]

CHECKS: Final[tuple[Check, ...]] = (
    host.check_process,
    host.check_shared_memory,
    host.check_open_files,
    software.check_packages,
    software.check_torch,
    software.check_triton,
    nccl.check_nccl,
    gpu.check_gpus,
    gpu.check_symmetric_memory,
    software.check_variables,
    self_test.check_all_reduce,
)


def examine(probe: Probe | None = None, *, checks: Iterable[Check] = CHECKS) -> Report:
    """Look at this machine and say what it can do for pcomm, and why not.

    Takes no GPU memory and creates no CUDA context. The last check starts two processes for a
    moment. A check that fails itself is reported as broken, and the others still run.

    Args:
        probe: Source of the facts; this machine if absent.
        checks: Checks to run, in this order.
    """
    where = ThisMachine() if probe is None else probe
    return Report(tuple(finding for check in checks for finding in _run(check, where)))


def installed_checks() -> list[Check]:
    """The checks that other installed packages bring. Local; each is imported when it runs."""
    # One distribution is found twice where its source folder is on the path as well.
    entries = {entry.value: entry for entry in entry_points(group=GROUP)}
    return [_imported(entry) for entry in sorted(entries.values(), key=lambda entry: entry.name)]


def _imported(entry: EntryPoint) -> Check:
    def check(probe: Probe) -> Iterable[Finding]:
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


def _run(check: Check, probe: Probe) -> list[Finding]:
    try:
        return list(check(probe))
    except Exception as error:
        name = getattr(check, "__name__", "check")
        reason = f"{type(error).__name__}: {error}"
        fix = "This is a mistake in pcomm: report it with this line."
        return [Finding(name, "broken", "the check itself failed", reason, fix)]
