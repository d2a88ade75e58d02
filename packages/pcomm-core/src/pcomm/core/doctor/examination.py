"""Runs every check; the library call behind `pcomm doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pcomm.core.doctor import gpu, host, nccl, self_test, software
from pcomm.core.doctor.probe import Probe
from pcomm.core.doctor.report import Finding, Report
from pcomm.core.doctor.this_machine import ThisMachine

__all__ = ["CHECKS", "Check", "examine"]

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


def _run(check: Check, probe: Probe) -> list[Finding]:
    try:
        return list(check(probe))
    except Exception as error:
        name = getattr(check, "__name__", "check")
        reason = f"{type(error).__name__}: {error}"
        fix = "This is a mistake in pcomm: report it with this line."
        return [Finding(name, "broken", "the check itself failed", reason, fix)]
