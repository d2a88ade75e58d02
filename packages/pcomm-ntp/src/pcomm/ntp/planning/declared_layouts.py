"""The layout that a model declares for a parameter beside the one that a plan gives it."""

from __future__ import annotations

from pcomm.core.layout import Layout, Run

__all__ = ["lies_as_planned"]


def lies_as_planned(declared: Layout, planned: Layout) -> bool:
    """Whether every rank holds the same positions in the same order, however cut into runs."""
    if (declared.length, declared.size) != (planned.length, planned.size):
        return False
    return list(map(_joined, declared.runs)) == list(map(_joined, planned.runs))


def _joined(runs: tuple[Run, ...]) -> list[Run]:
    """Runs with neighbours that touch joined into one."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = Run(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined
