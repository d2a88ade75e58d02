"""The norm of gradients that lie in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel import norms as squares
from pcomm.fsdp.runtime.local_params import LocalParams
from pcomm.fsdp.runtime.param_shard import ParamShard

__all__ = ["scale_gradients", "sum_of_squares"]


def sum_of_squares(
    shards: Sequence[ParamShard | LocalParams], selects: Callable[[str], bool]
) -> Tensor:
    """Sum of squares of all gradients of the parameters selected by name, in fp64. Collective.

    One all-reduce of one number over the gather group of each scope, and one over the group that
    the scope is spread over. Shards have nothing in common, and replicas hold the same and count
    once. Scopes that share both groups share the all-reduce.
    """
    device = shards[0].parameters[0].device if shards else torch.device("cpu")
    terms: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    over: dict[tuple[tuple[int, ...], ...], list[Group]] = {}
    for shard in shards:
        plan = shard.plan
        summed = [one for one in (plan.gather, plan.spread) if one is not None and one.size > 1]
        key = tuple(one.ranks for one in summed)
        over[key] = summed
        mine = terms.setdefault(key, [])
        gradients = [
            parameter.grad.as_subclass(Tensor)
            for name, parameter in zip(plan.names, shard.parameters, strict=True)
            if parameter.grad is not None and selects(name)
        ]
        if gradients:
            mine.append(squares.sum_of_squares(gradients, device))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key, mine in terms.items():
        found = torch.stack(mine).sum() if mine else torch.zeros_like(total)
        for one in over[key]:
            found = one.collectives.all_reduce(found)
        total += found
    return total


def scale_gradients(shards: Sequence[ParamShard | LocalParams], scale: Tensor) -> None:
    """Multiply all gradients by a number on their device. Local."""
    for shard in shards:
        gradients = [p.grad.as_subclass(Tensor) for p in shard.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
