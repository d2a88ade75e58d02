"""Replicas, even or uneven: their groups, this rank's rows, their gradients and these' norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core import Collectives, Group, GroupSpec, Topology
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.fsdp import Sharded
from pcomm.integration.checkpoint.state import planned_shard_views, training_shard_views
from pcomm.integration.config.sections import Resolved
from pcomm.ntp import GradSync, NtpPlan

__all__ = [
    "DataParallel",
    "PlannedReplicas",
    "RunPlace",
    "ShardedReplicas",
    "global_norm",
    "group_names",
    "group_specs",
    "numbered",
    "replicas_left",
    "sum_partial_gradients",
    "used_ranks",
]


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
        sharded: The sharded model of this rank.
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

    def __init__(self, model: nn.Module, sync: GradSync, plan: NtpPlan, rank: int) -> None:
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


@dataclass(frozen=True)
class RunPlace:
    """Where this rank stands; made by `uniform` or `planned`.

    Args:
        replica: Data-parallel rank.
        num_replicas: Number of data-parallel ranks.
        cp: Context-parallel rank.
        tp: Rank in its tensor-parallel group.
        shares: Rows that each replica takes of a batch, where they differ; empty for as many each.
        token_multiple: Number that the tokens of a micro-batch are filled up to a multiple of: 1
            where the configuration makes them one.
        rank: Global rank, failed ranks counted.
    """

    replica: int
    num_replicas: int
    cp: int
    tp: int
    shares: tuple[int, ...]
    token_multiple: int
    rank: int

    @classmethod
    def uniform(cls, config: Resolved, topology: Topology, everyone: Group) -> RunPlace:
        """The place of a rank of which no other has failed. Local."""
        at = topology.coordinates(everyone.rank)
        return cls(at["dp"], config.parallel.dp, at["cp"], at["tp"], (), 1, everyone.rank)

    @classmethod
    def planned(cls, config: Resolved, plan: NtpPlan, everyone: Group) -> RunPlace:
        """The place of a rank that `plan` uses. Local.

        Args:
            config: The configuration.
            plan: The plan; its replicas take rows by their speeds.
            everyone: Group of all ranks that the plan uses, with their numbers in its topology.
        """
        rank, train = everyone.ranks[everyone.rank], config.train
        place, at = plan.place(rank), plan.topology.coordinates(rank)
        shares = plan.token_shares(train.global_batch_tokens, multiple=train.sequence_length)
        # Replicas that have lost all of their ranks are not counted.
        tokens = {replica: share for replica, share in enumerate(shares) if share}
        splits = place.degree if config.parallel.sequence else 1
        return cls(
            list(tokens).index(place.replica),
            len(tokens),
            at["cp"],
            place.index,
            tuple(n // train.sequence_length for n in tokens.values()),
            config.parallel.cp * splits,
            rank,
        )


def _names(plan: NtpPlan, rank: int) -> dict[str, str]:
    """Names of the groups that `rank` belongs to, by kind."""
    place, cp = plan.place(rank), plan.topology.coordinates(rank)["cp"]
    return {
        "tp": f"run.tp.{place.replica}.{cp}",
        # Ranks of cp hold the same heads, so their place in tp is counted without failed ranks.
        "cp": f"run.cp.{place.replica}.{place.index}",
        "rows": f"run.rows.{place.replica}",
        "all": _ALL,
    }


def group_names(plan: NtpPlan, rank: int, names: Mapping[str, str]) -> dict[str, str]:
    """Name in a uniform run by the one in `group_specs`, for the groups of `rank`. Local.

    Args:
        plan: The plan of the run.
        rank: Global rank of this process.
        names: Name in a uniform run of the groups `tp`, `cp`, `rows` and `all`.
    """
    return {name: names[kind] for kind, name in _names(plan, rank).items()}


_ALL = "run.all"


def used_ranks(plan: NtpPlan) -> tuple[int, ...]:
    """Global ranks that have work, ascending. Local."""
    unused = plan.topology.failed.union(plan.idle_ranks)
    return tuple(rank for rank in plan.topology.ranks if rank not in unused)


def replicas_left(plan: NtpPlan) -> int:
    """Number of replicas that have ranks with work. Local."""
    return sum(min(own) > 0 for own in plan.degrees)


def group_specs(plan: NtpPlan, roles: Sequence[str]) -> tuple[GroupSpec, ...]:
    """Groups along tp and cp, those of ranks with tokens of the same rows, and that of all. Local.

    Args:
        plan: The plan of the run.
        roles: Further roles of the group of all ranks, whose communicators are on the host.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for rank in used_ranks(plan):
        for name in _names(plan, rank).values():
            members[name].append(rank)
    specs = [GroupSpec.of_ranks(members[name], name) for name in sorted(members)]
    return (*specs, *(GroupSpec.of_ranks(members[_ALL], _ALL, r, backend="gloo") for r in roles))


def numbered(specs: Sequence[GroupSpec], ranks: Sequence[int]) -> list[GroupSpec]:
    """`specs` for processes of which process i is the rank `ranks[i]`. Local."""
    process = {rank: i for i, rank in enumerate(ranks)}
    return [replace(s, ranks=tuple(process[r] for r in s.ranks or ())) for s in specs]


def sum_partial_gradients(model: nn.Module, collectives: Collectives) -> None:
    """Add up the gradients of parameters that all ranks hold but each used in part.

    Collective over the tensor-parallel group: one all-reduce for all of them together. Those are
    norms under sequence parallelism and norms shared by heads; see `ParamLayout`.
    """
    if collectives.size == 1:
        return
    layouts = param_layouts_of(model)
    # Each rank's part of a gradient is added to the same part on others.
    partial = [
        parameter.grad.as_subclass(Tensor)
        for name, parameter in model.named_parameters()
        if layouts[name].has_partial_gradient and parameter.grad is not None
    ]
    if not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    collectives.all_reduce(flat, out=flat)
    parts = flat.split([gradient.numel() for gradient in partial])
    for gradient, part in zip(partial, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def global_norm(
    sharded: Sharded, layouts: Mapping[str, ParamLayout], tensor_parallel: Collectives
) -> Tensor:
    """The norm of the gradient of the *whole* model, a number in fp64, the same on all ranks.

    Collective over the groups that split parameters or hold their shards. A parameter that every
    rank holds counts once, one that is split counts with all its parts.

    Args:
        sharded: The model, with gradients that are summed over replicas already. A scope that other
            ranks hold more of, such as that of experts, says so in `Scope.spread`.
        layouts: `ParamLayout` of each parameter, by name.
        tensor_parallel: Collectives of the group that splits the dense parameters.
    """
    if tensor_parallel.size == 1:
        return sharded.grad_norm()

    def is_split(name: str) -> bool:
        return layouts[name].is_split and layouts[name].scope == "dense"

    total = sharded.sum_of_squares(lambda name: not is_split(name))
    split = sharded.sum_of_squares(is_split)
    return (total + tensor_parallel.all_reduce(split)).sqrt()
