"""Norms of gradients that lie in shards: together, those of all of them are the model's norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pcomm.core.groups.group import Group
from pcomm.fsdp.guards import torch_function_errors
from pcomm.fsdp.guards.gradient_origin import Origin, alive
from pcomm.fsdp.guards.shard_tensor import NORMS, ShardTensor

__all__ = ["ShardNorm"]

_MOVES = ("to", "cpu", "cuda", "double", "float", "detach")
"""Functions after which a norm is still one."""


class ShardNorm(ShardTensor):
    """Norms of shards, good for one thing: the norm of all of them together.

    Attributes:
        order: Order of the norm.
        origins: The origin of the shard behind each element; None for a whole tensor.
        is_entire: True if it is the norm of a whole gradient, which may be used alone, too.
    """

    order: float
    origins: list[Origin | None]
    is_entire: bool

    @classmethod
    def of(cls, value: Tensor, order: float, origins: list[Origin | None]) -> ShardNorm:
        """The norms `value` of shards of these origins. Local."""
        norm = value.as_subclass(cls)
        norm.order, norm.origins, norm.is_entire = order, origins, False
        return norm

    @classmethod
    def _instead_of(
        cls,
        name: str,
        types: Collection[type],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[Any],
    ) -> Any:
        if name == "stack":
            return _stacked(*args, **kwargs)
        if name in NORMS and isinstance(args[0], ShardNorm):
            return _total(*args, **kwargs)
        return NotImplemented

    @classmethod
    def _taken(cls, name: str, result: Any, args: Sequence[Any], given: Sequence[Any]) -> Any:
        norms = [one for one in given if isinstance(one, ShardNorm)]
        if name in _MOVES:
            (norm,) = norms
            moved = cls.of(result, norm.order, norm.origins)
            moved.is_entire = norm.is_entire
            return moved
        if all(norm.is_entire for norm in norms):
            return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
        if isinstance(result, Tensor) or name in ("item", "tolist", "__float__", "__bool__"):
            raise torch_function_errors.mixed_elements("norm")
        return result


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> ShardNorm:
    norms = [one for one in tensors if isinstance(one, ShardNorm)]
    origins = [one.origins[0] if isinstance(one, ShardNorm) else None for one in tensors]
    if any(one.dim() for one in tensors) or len({one.order for one in norms}) > 1:
        raise torch_function_errors.mixed_elements("stack of norms")
    values = torch.stack([one.as_subclass(Tensor) for one in tensors])
    return ShardNorm.of(values, norms[0].order, origins)


def _total(
    norms: ShardNorm,
    ord: Any = None,
    dim: Any = None,
    *_: Any,
    p: Any = None,
    dtype: torch.dtype | None = None,
    **__: Any,
) -> Tensor:
    """The norm over all ranks. Collective: one all-reduce for each set of groups, in fp64."""
    given = p if ord is None else ord
    order = 2.0 if given in (None, "fro") else float(given)
    if order != norms.order or dim is not None:
        raise torch_function_errors.mixed_elements(
            f"norm of order {given} of norms of order {norms.order}"
        )
    powers = norms.as_subclass(Tensor).double().view(-1)
    powers = powers if math.isinf(order) else powers.pow(order)
    together: Callable[[Tensor], Tensor] = torch.amax if math.isinf(order) else torch.sum
    terms: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    over: dict[tuple[tuple[int, ...], ...], tuple[Group, ...]] = {}
    for place, origin in enumerate(norms.origins):
        groups = () if origin is None else alive(origin).over
        key = tuple(group.ranks for group in groups)
        terms.setdefault(key, []).append(place)
        over[key] = groups
    sums = []
    for key, places in terms.items():
        total = together(powers[places])
        for group in over[key]:
            total = group.collectives.all_reduce(total, op="max" if math.isinf(order) else "sum")
        sums.append(total)
    whole = together(torch.stack(sums))
    whole = whole if math.isinf(order) else whole.pow(1 / order)
    return whole.to(dtype or norms.dtype)
