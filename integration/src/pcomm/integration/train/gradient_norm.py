"""Gradients of a model that is split over ranks, seen as those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pcomm.core import Collectives
from pcomm.core.tensor_parallel import param_layouts_of, sum_of_squares

__all__ = ["clip_by_global_norm", "sum_partial_gradients"]


def sum_partial_gradients(model: nn.Module, collectives: Collectives) -> None:
    """Add up the gradients of parameters that all ranks hold but each used in part.

    Collective over the tensor-parallel group: one all-reduce for all of them together. Those are
    norms under sequence parallelism and norms shared by heads; see `ParamLayout`.
    """
    if collectives.size == 1:
        return
    placements = param_layouts_of(model)
    # Each rank's part of a gradient is added to the same part on others.
    partial = [
        parameter.grad.as_subclass(Tensor)
        for name, parameter in model.named_parameters()
        if placements[name].has_partial_gradient and parameter.grad is not None
    ]
    if not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    collectives.all_reduce(flat, out=flat)
    parts = flat.split([gradient.numel() for gradient in partial])
    for gradient, part in zip(partial, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_by_global_norm(
    model: nn.Module,
    collectives: Mapping[str, Collectives],
    max_norm: float,
    *,
    holders: Mapping[str, Collectives] | None = None,
) -> Tensor:
    """Scale all gradients so that the norm over the *whole* model is at most `max_norm`.

    Collective over the groups that split parameters or hold their shards: one all-reduce of one or
    two numbers in each. A parameter that every rank holds counts once, one that is split counts
    with all its parts, so every expert counts once. Without a limit (`max_norm` 0) the norm is only
    measured; where it is not finite, the gradients stay as they are, to be looked at.

    Args:
        model: Its gradients are summed over replicas already.
        collectives: Of the group that splits the parameters of each scope of `ParamLayout`.
        max_norm: 0 for no limit.
        holders: Of the group that holds the shards of a scope's parameters, where they are sharded.

    Returns:
        The norm before, a number in fp64, the same on all ranks.
    """
    placements = param_layouts_of(model)
    # The ranks that hold the other parts of a gradient add up below.
    named = [
        (placements[name], parameter.grad.as_subclass(Tensor))
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    device = next(model.parameters()).device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for scope, splitting in collectives.items():
        mine = [(place.is_split, grad) for place, grad in named if place.scope == scope]
        parts = (
            [grad for is_split, grad in mine if is_split is wanted] for wanted in (False, True)
        )
        both = torch.stack([sum_of_squares(gradients, device) for gradients in parts])
        holding = (holders or {}).get(scope)
        if holding is not None and holding.size > 1:
            both = holding.all_reduce(both, out=both)
        whole, split = both.unbind()
        squares = squares + whole + (splitting.all_reduce(split) if splitting.size > 1 else split)
    norm = squares.sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(norm.isfinite(), 1.0)
        gradients = [gradient for _, gradient in named]
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
    return norm
