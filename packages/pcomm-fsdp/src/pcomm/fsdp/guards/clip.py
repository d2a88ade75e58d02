"""The norm of gradients that lie in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel import norms as squares
from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.runtime.local_group import LocalGroup

__all__ = ["scale_gradients", "sum_of_squares"]


def sum_of_squares(
    groups: Sequence[FlatGroup | LocalGroup], selects: Callable[[str], bool]
) -> Tensor:
    """Of all gradients of the parameters selected by name, in fp64. Collective.

    One all-reduce of one number over the gather group of each scope, and one over the group that
    the scope is spread over. Shards have nothing in common, and replicas hold the same and count
    once. Scopes that share both groups share the all-reduce.
    """
    device = groups[0].parts[0].device if groups else torch.device("cpu")
    terms: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    over: dict[tuple[tuple[int, ...], ...], list[Group]] = {}
    for group in groups:
        plan = group.plan
        summed = [one for one in (plan.gather, plan.spread) if one is not None and one.size > 1]
        key = tuple(one.ranks for one in summed)
        over[key] = summed
        mine = terms.setdefault(key, [])
        gradients = [
            part.grad.as_subclass(Tensor)
            for name, part in zip(plan.names, group.parts, strict=True)
            if part.grad is not None and selects(name)
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


def scale_gradients(groups: Sequence[FlatGroup | LocalGroup], scale: Tensor) -> None:
    """Multiply all gradients by a number on their device. Local."""
    for group in groups:
        gradients = [p.grad.as_subclass(Tensor) for p in group.parts if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
