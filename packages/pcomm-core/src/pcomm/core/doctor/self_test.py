"""The check that ranks can communicate here: two of them add two numbers over gloo."""

from __future__ import annotations

from collections.abc import Iterable

from pcomm.core.doctor.probe import Probe
from pcomm.core.doctor.report import Finding

__all__ = ["check_all_reduce"]

# Starting two processes that import torch takes most of it; a machine that is busy takes longer.
_TIMEOUT_S = 30.0


def check_all_reduce(probe: Probe) -> Iterable[Finding]:
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
