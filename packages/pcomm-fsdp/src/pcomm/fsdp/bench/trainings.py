"""What is compared: one forward and backward of a model, sharded in different ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.group import Group
from pcomm.fsdp.bench.models import Problem
from pcomm.fsdp.fully_shard import fully_shard
from pcomm.fsdp.policy import CommPolicy
from pcomm.fsdp.roles import Roles
from pcomm.fsdp.sharded import Sharded

__all__ = ["Fsdp2", "Sharding", "Training", "Unsharded"]


class Training(Protocol):
    """A model that is ready to be trained."""

    @property
    def model(self) -> nn.Module:
        """What is called."""

    @property
    def num_backward_gathers(self) -> int:
        """Units that are gathered again in backward; known after the first step."""

    def shard_gradients(self) -> list[Tensor]:
        """The gradients of those. Local."""

    def whole_gradients(self) -> dict[str, Tensor]:
        """Gradients as a model in one process has them. Collective."""

    def forget_gradients(self) -> None:
        """As an optimizer's `zero_grad`. Local."""


class Unsharded:
    """A model in one process, which sends nothing."""

    num_backward_gathers = 0

    def __init__(self, problem: Problem) -> None:
        self.model: nn.Module = problem.build()

    def shard_gradients(self) -> list[Tensor]:
        """See `Training`."""
        return _gradients(self.model.parameters())

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
        prefetch: How many units are gathered ahead.
    """

    def __init__(
        self, problem: Problem, gather: Group, reduce: Group, *, prefetch: int = 1
    ) -> None:
        self._sharded = fully_shard(
            problem.build(),
            Roles(gather, reduce),
            units=[problem.unit],
            comm=CommPolicy(prefetch=prefetch),
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

    def shard_gradients(self) -> list[Tensor]:
        """See `Training`."""
        return _gradients(self._sharded.parameters())

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


class Fsdp2:
    """A model sharded by torch.

    Args:
        problem: The model.
        group: Its one communicator.
        prefetch: How many units are gathered ahead, by explicit lists; 0 leaves that to torch.
        reduce: Whose reduce-scatter takes the place of torch's, which moves twice the bytes on
            gloo; None leaves torch's.
    """

    def __init__(
        self,
        problem: Problem,
        group: dist.ProcessGroup,
        *,
        prefetch: int = 0,
        reduce: Collectives | None = None,
    ) -> None:
        model = problem.build()
        mesh = DeviceMesh.from_group(group, "cpu")
        for unit in model:
            torch_fully_shard(unit, mesh=mesh)
        torch_fully_shard(model, mesh=mesh)
        self.model: nn.Module = model
        # As shipped it gathers the unit again that it has just released.
        self.num_backward_gathers = problem.depth - (prefetch > 0)
        assert isinstance(model, FSDPModule)
        if prefetch:
            _prefetch(model, list(model), prefetch)
        if reduce is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # Torch exports no base class for it; it asks for no more than these methods.
                    module.set_custom_reduce_scatter(_ReduceScatter(reduce))  # type: ignore[arg-type]

    def shard_gradients(self) -> list[Tensor]:
        """See `Training`."""
        return [_local(gradient) for gradient in _gradients(self.model.parameters())]

    def whole_gradients(self) -> dict[str, Tensor]:
        """See `Training`."""
        found = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor()
        return found

    def forget_gradients(self) -> None:
        """See `Training`."""
        self.model.zero_grad()


class _ReduceScatter:
    """Our reduce-scatter behind torch's interface; whichever group torch names, ours is used."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        self._collectives.reduce_scatter(input_tensor, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self._collectives.size)


def _prefetch(root: FSDPModule, units: Sequence[Any], depth: int) -> None:
    """Everything FSDP2 offers so that gathers go on during computation on the CPU."""
    root._set_unshard_async_op(True)
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + depth])
        before = units[max(0, place - depth) : place]
        unit.set_modules_to_backward_prefetch(list(reversed(before)))
    # What is needed first in backward is not given away before.
    units[-1].set_reshard_after_forward(False)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = [parameter.grad for parameter in parameters]
    kept = [gradient for gradient in found if gradient is not None]
    assert len(kept) == len(found), "a step left a parameter without a gradient"
    return kept


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
