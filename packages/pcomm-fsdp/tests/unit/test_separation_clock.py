"""When the clock of `separate="auto"` starts and stops: a record of calls, no time."""

from __future__ import annotations

import time

import pytest
import torch

from pcomm.core.collectives.protocol import Pending
from pcomm.core.groups.group import Group
from pcomm.fsdp import separation as measure
from pcomm.fsdp.separation import measure_separation

CASES = [["gather: gather"], ["reduce: reduce"]]
BOTH = [["gather: reduce", "gather: gather"], ["reduce: reduce", "gather: gather"]]


class Recorder:
    """Collectives on which nothing is ever over until the device is synchronised."""

    rank, size = 0, 2

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def all_reduce(
        self, x: torch.Tensor, *, op: str = "sum", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.log.append(f"{self.name}: meet")
        return x

    def all_gather_async(self, x: torch.Tensor, *, out: torch.Tensor) -> Pending:
        self.log.append(f"{self.name}: gather")
        return Pending(lambda: self._end(out))

    def reduce_scatter_async(self, x: torch.Tensor) -> Pending:
        self.log.append(f"{self.name}: reduce")
        return Pending(lambda: self._end(x))

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append("wait")
        return x


def test_the_clock_runs_from_the_end_of_the_meeting_to_the_end_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a collective returns when it is queued, so both ends need the device's word."""
    log: list[str] = []

    def read() -> float:
        log.append("clock")
        return float(len(log))

    monkeypatch.setattr(measure, "_synchronise", lambda device: log.append("synchronise"))
    monkeypatch.setattr(time, "perf_counter", read)
    groups = []
    for name in ("gather", "reduce"):
        group = Group("dp", (0, 1), None, role=name)
        group.collectives = Recorder(name, log)  # type: ignore[assignment]
        groups.append(group)
    measure_separation(
        *groups,
        num_elements=64,
        gather_dtype=torch.float32,
        reduce_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert log.pop() == "gather: meet", "the ranks exchange their medians"
    runs: list[list[str]] = []
    for word in log:
        if word == "gather: meet":
            runs.append([])
        if runs:
            runs[-1].append(word)
    # Two to warm up, then five rounds of four cases.
    expected = [BOTH[0], BOTH[1], *([*CASES, *BOTH] * 5)]
    for run, issued in zip(runs, expected, strict=True):
        timed = ["clock", *issued, *["wait"] * len(issued), "synchronise", "clock"]
        # Before the meeting too: what the last run left must not be in this one.
        assert run[: len(timed) + 2] == ["gather: meet", "synchronise", *timed]
    assert all(run[-1] == "synchronise" for run in runs[:-1])
