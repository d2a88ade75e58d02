"""Sessions on NCCL; never run on hardware yet. With two GPUs a rank is killed in an operation."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from pcomm.core import Groups, Topology
from pcomm.core.process import RankPlace, ResilientRanks
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.session import Session, Timeouts, TrainState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]


def _train(place: RankPlace, size: int, dies: int | None) -> tuple[list[int], float, int]:
    """Five steps of one weight; rank `dies` is killed in the third, after the others queued it."""
    device = torch.device("cuda", place.rank)
    torch.cuda.set_device(device)

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = torch.nn.Linear(1, 1, bias=False, device=device)
        torch.nn.init.ones_(model.weight)
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25))

    options: dict[str, Any] = {"backend": "nccl", "device": device}
    limits = Timeouts(operation_s=600.0, agree_s=60.0)
    topology, steps = Topology({"dp": size, "tp": 1}), []
    with Session(place, topology, {}, build, timeouts=limits, **options) as session:
        for attempt in session.attempts(until=5):
            with attempt as step:
                if place.rank == dies and step.number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = session.model(torch.ones(1, 1, device=device)).sum()
                step.backward(loss, weight=1 / len(session.ranks))
                step.commit(max_norm=10.0)
                steps.append(step.number)
        return steps, session.model.weight.item(), session.generation


def test_one_rank_trains() -> None:
    with ResilientRanks(1) as ranks:
        ranks.start(_train, (1, None))
        (report,) = ranks.wait(timeout_s=120.0).values()
    assert report.result == ([0, 1, 2, 3, 4], -0.25, 0), report


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank that dies needs another: 2 GPUs")
def test_the_others_go_on_when_a_rank_is_killed_in_an_operation() -> None:
    size = torch.cuda.device_count()
    with ResilientRanks(size) as ranks:
        ranks.start(_train, (size, size - 1))
        # Far below the limit of an operation, whose end would be a watchdog's.
        reports = ranks.wait(timeout_s=300.0)
    for rank in range(size - 1):
        assert reports[rank].result == ([0, 1, 2, 3, 4], -0.25, 1), reports[rank]
