"""The cases that are compared: one forward and backward of a model, sharded in different ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from pcomm.core.groups.group import Group
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.bench.models import Problem
from pcomm.fsdp.settings.policy import CommPolicy
from pcomm.fsdp.settings.roles import Roles
from pcomm.fsdp.sharded import Sharded

__all__ = ["Sharding", "Training", "Unsharded", "gradients_of", "run_step"]


class Training(Protocol):
    """A model that is ready to be trained."""

    @property
    def model(self) -> nn.Module:
        """The module that is called."""

    @property
    def num_backward_gathers(self) -> int:
        """Units that are gathered again in backward; known after the first step."""

    def finish_backward(self) -> None:
        """Wait for what backward has left under way. Local."""

    def shard_gradients(self) -> list[Tensor]:
        """The gradients of this rank's parameters. Local."""

    def whole_gradients(self) -> dict[str, Tensor]:
        """Gradients as a model in one process has them. Collective."""

    def forget_gradients(self) -> None:
        """As an optimizer's `zero_grad`. Local."""


class Unsharded:
    """A model in one process, which sends nothing."""

    num_backward_gathers = 0

    def __init__(self, problem: Problem) -> None:
        self.model: nn.Module = problem.build()

    def finish_backward(self) -> None:
        """See `Training`; nothing is."""

    def shard_gradients(self) -> list[Tensor]:
        """See `Training`."""
        return gradients_of(self.model.parameters())

    def whole_gradients(self) -> dict[str, Tensor]:
        """See `Training`."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def forget_gradients(self) -> None:
        """See `Training`."""
        self.model.zero_grad()


class Sharding:
    """A model sharded by `pcomm.fsdp`.

    Args:
        problem: The model.
        gather: Group that gathers.
        reduce: Group that reduces; `gather` for one communicator.
        comm: Depths; the usual ones if None.
    """

    def __init__(
        self, problem: Problem, gather: Group, reduce: Group, comm: CommPolicy | None = None
    ) -> None:
        self._sharded = fully_shard(
            problem.build(),
            Roles(gather, reduce),
            units=[problem.unit],
            comm=comm or CommPolicy(),
        )
        self.model: nn.Module = self._sharded.model

    @property
    def sharded(self) -> Sharded:
        """The shards of the model, and its schedule."""
        return self._sharded

    @property
    def num_backward_gathers(self) -> int:
        """See `Training`."""
        schedule = self._sharded.schedule
        assert schedule is not None
        steps = schedule.steps
        return sum(step.kind == "gather" and step.phase == "backward" for step in steps)

    def finish_backward(self) -> None:
        """See `Training`; nothing is."""

    def shard_gradients(self) -> list[Tensor]:
        """See `Training`."""
        return gradients_of(self._sharded.parameters())

    def whole_gradients(self) -> dict[str, Tensor]:
        """See `Training`; whole values are gathered while the shards hold their gradients."""
        parameters = list(self._sharded.parameters())
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
            found = self._sharded.full_state_dict()
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        self._sharded.parameters_changed()
        return found

    def forget_gradients(self) -> None:
        """See `Training`."""
        self._sharded.zero_grad()


def run_step(training: Training, problem: Problem, batch_RD: Tensor) -> None:
    """Forward and backward, until every gradient is there. Collective over the training's ranks."""
    problem.loss(training.model, batch_RD).backward()
    training.finish_backward()


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters, each of which must have one. Local."""
    found = [parameter.grad for parameter in parameters]
    kept = [gradient for gradient in found if gradient is not None]
    assert len(kept) == len(found), "a step left a parameter without a gradient"
    return kept
