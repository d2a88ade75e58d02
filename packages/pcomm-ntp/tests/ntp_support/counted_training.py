"""A model whose forward changes a buffer, and a learning rate that changes behind each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcomm.core import Groups, Topology
from pcomm.core.process import RankPlace
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.session import Session, TrainState
from pcomm.ntp.session.failure_detection import SuspectedFailure

__all__ = ["count_in_session"]


def count_in_session(
    place: RankPlace, until: int, point: str, step: int
) -> tuple[int, float, float]:
    """Train to step `until` with an error on rank 0; a task of `ResilientRanks`.

    Args:
        place: Place of this rank.
        until: Number of steps.
        point: `forward` for an error before the sums, `ready` for one of the rank that does not
            hear that all are ready.
        step: Number of the step with the error.

    Returns:
        Calls of the model as its buffer counts them, the learning rate, and the weight.
    """
    left = [(point, step)] if place.rank == 0 else []

    def strike(point: str, step: int) -> None:
        if (point, step) in left:
            left.clear()
            raise SuspectedFailure("a test", found="nothing", why="A fault.", fix="Go on.")

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = _Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.register_step_pre_hook(lambda *_: strike("ready", session.step))
        return TrainState(model, optimizer)

    with Session(place, Topology({"dp": place.size, "tp": 1}), _UNITS, build) as session:
        for attempt in session.attempts(until=until):
            with attempt as taken:
                loss = session.model(torch.tensor([float(taken.number)]))
                strike("forward", taken.number)
                taken.backward(loss, weight=1 / place.size)
                taken.commit()
                for group in session.optimizer.param_groups:
                    group["lr"] *= 0.5
        count, weight = session.model.count, session.model.weight
        assert isinstance(count, Tensor)
        assert isinstance(weight, Tensor)
        rate = float(session.optimizer.param_groups[0]["lr"])
        return int(count.item()), rate, weight.item()


_UNITS = {"unused": Units.columns(1)}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        count = self.count
        assert isinstance(count, Tensor)
        count += 1
        return (self.weight * x).sum()
