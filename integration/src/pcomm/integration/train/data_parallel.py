"""What replicas do with their gradients, in one form for shards and for uneven replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core import Collectives
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.fsdp import Sharded
from pcomm.integration.checkpoint.state import planned_shard_views, training_shard_views
from pcomm.integration.train.gradient_norm import global_norm, sum_partial_gradients
from pcomm.ntp import GradSync, Plan

__all__ = ["DataParallel", "PlannedReplicas", "ShardedReplicas"]


class DataParallel(Protocol):
    """The parameters that an optimizer changes, and the sum of their gradients over replicas."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer changes, by the name in the model. Local."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients. Local."""
        ...

    def accumulate(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch; that of the last one sums over replicas."""
        ...

    def finish(self) -> Tensor:
        """Complete the sums of a step: the norm of the whole gradient, fp64, on all ranks alike.

        Collective; called once, after the last backward.
        """
        ...

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients whose norm is `norm` so that it is at most `max_norm`. Local."""
        ...

    def shard_views(self, optimizer: Optimizer) -> dict[str, ShardView]:
        """This rank's part of parameters and AdamW's averages, by name in a checkpoint. Local."""
        ...

    def parameters_changed(self) -> None:
        """Say that parameters were written other than by the optimizer. Local; on all ranks."""
        ...


class ShardedReplicas:
    """Replicas of one shape, whose parameters are `pcomm.fsdp` shards.

    Args:
        model: The model.
        sharded: Its shards.
        layouts: `ParamLayout` of each parameter, by name.
        ranks: Rank of this process by the scope of `ParamLayout`.
        tensor_parallel: Collectives of the group that splits the dense parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: Sharded,
        layouts: Mapping[str, ParamLayout],
        ranks: Mapping[str, int],
        tensor_parallel: Collectives,
    ) -> None:
        self.sharded = sharded
        self._model, self._layouts, self._ranks = model, layouts, ranks
        self._tensor_parallel = tensor_parallel
        self.named_parameters = sharded.named_parameters
        self.zero_grad, self.accumulate = sharded.zero_grad, sharded.accumulate
        self.parameters_changed = sharded.parameters_changed

    def finish(self) -> Tensor:
        """See `DataParallel`."""
        sum_partial_gradients(self._model, self._tensor_parallel)
        return global_norm(self.sharded, self._layouts, self._tensor_parallel)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """See `DataParallel`."""
        self.sharded.clip_grad_norm(max_norm, norm=norm)

    def shard_views(self, optimizer: Optimizer) -> dict[str, ShardView]:
        """See `DataParallel`."""
        return training_shard_views(self.sharded, optimizer, self._layouts, self._ranks)


class PlannedReplicas:
    """Replicas of different tensor-parallel degrees, whose gradients `GradSync` sums.

    Args:
        model: The model, whose parameters the optimizer changes as they are.
        sync: Sums of its gradients.
        plan: Plan of the job.
        rank: Global rank of this process.
    """

    def __init__(self, model: nn.Module, sync: GradSync, plan: Plan, rank: int) -> None:
        self.sync, self._model, self._plan, self._rank = sync, model, plan, rank
        self.named_parameters = model.named_parameters
        self.zero_grad = sync.zero_grad

    def accumulate(self, *, is_last: bool) -> AbstractContextManager[None]:
        """See `DataParallel`."""
        return self.sync.accumulate(is_last=is_last)

    def finish(self) -> Tensor:
        """See `DataParallel`."""
        self.sync.finish()
        return self.sync.grad_norm()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """See `DataParallel`."""
        # The factor of pcomm-fsdp, from a norm that has the same bits on all ranks.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def shard_views(self, optimizer: Optimizer) -> dict[str, ShardView]:
        """See `DataParallel`."""
        return planned_shard_views(self._model, optimizer, self._plan, self._rank)

    def parameters_changed(self) -> None:
        """See `DataParallel`."""
