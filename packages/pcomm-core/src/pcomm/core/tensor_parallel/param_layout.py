"""Where a parameter of a module lies: whole on every rank, or split along one dimension.

A module that splits parameters says so in an attribute `param_layouts`; everything that has to know
(initialisation, gradient norms, checkpoints) asks `param_layouts_of` and never guesses from names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout

__all__ = ["ParamLayout", "join_shards", "param_layouts_of", "take_shard"]


@dataclass(frozen=True)
class ParamLayout:
    """How one parameter is spread over the ranks of the group of its scope.

    Args:
        layout: Layout of `dim`; None where every rank holds all of it.
        dim: Dimension along which it is split.
        has_partial_gradient: True if each rank computes only a part of the gradient of a parameter
            that all ranks hold, so that it must be summed over the group (norms under sequence
            parallelism, for example).
        scope: Name of the groups that the parameter belongs to: `"dense"` for the
            tensor-parallel one, `"expert"` for the expert-parallel one. Parameters of one scope
            share gather and reduce groups, too.
    """

    layout: Layout | None = None
    dim: int = 0
    has_partial_gradient: bool = False
    scope: str = "dense"

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts."""
        return self.layout is not None and self.layout.size > 1

    def logical_shape(self, local_shape: Sequence[int]) -> torch.Size:
        """Shape of the whole parameter of which one rank holds `local_shape`."""
        shape = list(local_shape)
        if self.layout is not None:
            shape[self.dim] = self.layout.length
        return torch.Size(shape)


def param_layouts_of(model: nn.Module) -> dict[str, ParamLayout]:
    """The layout of every parameter of `model` by its name in `named_parameters`. Local."""
    declared: dict[str, ParamLayout] = {}
    for prefix, module in model.named_modules():
        own = getattr(module, "param_layouts", {})
        for name, param_layout in own.items():
            declared[f"{prefix}.{name}" if prefix else name] = param_layout
    return {name: declared.get(name, ParamLayout()) for name, _ in model.named_parameters()}


def take_shard(whole: Tensor, layout: Layout, rank: int, *, dim: int = 0) -> Tensor:
    """The shard of `whole` that `rank` holds along `dim`: a view if it is one range. Local.

    Raises:
        LayoutError: `whole` is not as long as the layout.
    """
    _check_length("take_shard", whole, dim, layout.length)
    runs = layout.runs[rank]
    parts = [whole.narrow(dim, run.start, run.length) for run in runs]
    if not parts:
        return whole.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def join_shards(shards: Sequence[Tensor], layout: Layout, *, dim: int = 0) -> Tensor:
    """The whole tensor from the shards of all ranks; the inverse of `take_shard`. Local.

    Raises:
        LayoutError: Not one shard a rank, one of another length, or a layout with holes.
    """
    if len(shards) != layout.size or _has_holes(layout):
        raise LayoutError(
            f"join_shards: {len(shards)} shards",
            found=f"a layout over {layout.size} ranks of {layout.describe()}",
            why="Every rank gives its shard, and together they hold every position.",
            fix="Pass the shards of all ranks, in rank order, of a layout without holes.",
        )
    shape = list(shards[0].shape)
    shape[dim] = layout.length
    whole = shards[0].new_empty(shape)
    for shard, runs, size in zip(shards, layout.runs, layout.sizes, strict=True):
        _check_length("join_shards", shard, dim, size)
        start = 0
        for run in runs:
            whole.narrow(dim, run.start, run.length).copy_(shard.narrow(dim, start, run.length))
            start += run.length
    return whole


def _has_holes(layout: Layout) -> bool:
    """Whether no rank holds some position."""
    end = 0
    for run in sorted((run for own in layout.runs for run in own), key=lambda run: run.start):
        if run.start > end:
            return True
        end = max(end, run.stop)
    return end < layout.length


def _check_length(name: str, x: Tensor, dim: int, length: int) -> None:
    if x.shape[dim] != length:
        raise LayoutError(
            f"{name}: a tensor of shape {tuple(x.shape)} along dim {dim}",
            found=f"a layout that holds {length} positions there",
            why="The layout says which positions of that dimension a rank has.",
            fix="Pass the tensor and the dimension that the layout was made for.",
        )
