"""Gradients of a model that is split over ranks, seen as those of the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pcomm.core import Collectives
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.fsdp import Sharded

__all__ = ["global_norm", "sum_partial_gradients"]


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
