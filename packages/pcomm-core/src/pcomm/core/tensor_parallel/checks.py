"""Checks that the layers make of a layout, and the shard of the parameters that it gives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.param_layout import ParamLayout, take_shard

__all__ = [
    "check_ids",
    "check_partition",
    "check_rank_order",
    "empty_parameters",
    "first_position",
    "take_parameters",
]


def check_partition(layer: str, layout: Layout, collectives: Collectives) -> None:
    """Refuse a layout over other ranks than the group's, or that holds a position twice or never.

    Args:
        layer: Name of the layer, for the message.
        layout: Layout along which the layer is split.
        collectives: Collectives of the group that the layer runs on.
    """
    if layout.size != collectives.size:
        raise LayoutError(
            f"{layer}: a layout over {layout.size} ranks",
            found=f"a group of {collectives.size}",
            why="The layout names the share of every rank of the group.",
            fix="Build the layout with the size of the group.",
        )
    if not layout.is_partition:
        raise LayoutError(
            f"{layer}: {layout.describe()}",
            found="positions that several ranks hold, or none",
            why="Sums over the ranks would count a position twice, or leave it out.",
            fix="Use Layout.even, balanced or uneven, or sections of these.",
        )


def check_rank_order(layer: str, layout: Layout) -> None:
    """Refuse a layout whose shards do not lie one after another in rank order."""
    if not layout.is_contiguous:
        raise LayoutError(
            f"{layer}: {layout.describe()}",
            found="shares that do not lie one after another in rank order",
            why="Gathering joins shares in rank order, and an id is found from a rank's first.",
            fix="Use Layout.even, balanced or uneven; of sections, keep the output split.",
        )


def first_position(layout: Layout, rank: int) -> int:
    """The first position that `rank` holds of a layout in rank order."""
    return sum(layout.sizes[:rank])


def check_ids(layer: str, ids: Tensor, layout: Layout, *, ignored: int | None = None) -> None:
    """Refuse ids outside the layout: no rank holds them, and a sum over ranks would hide it.

    On the CPU it is an error here, on all ranks. Elsewhere looking would wait for the stream, so
    torch asserts it on the device, as it does within `F.embedding`.
    """
    is_known = (ids >= 0) & (ids < layout.length)
    if ignored is not None:
        is_known |= ids == ignored
    if not ids.is_cpu:
        torch._assert_async(is_known.all())
    elif not is_known.all():
        raise LayoutError(
            f"{layer}: ids {int(ids.min())} to {int(ids.max())}",
            found=f"a layout of {layout.length} positions",
            why="No rank holds an id outside the layout.",
            fix="Check that the ids come from a tokenizer of this vocabulary.",
        )


def take_parameters(module: nn.Module, whole: nn.Module, rank: int) -> None:
    """Give `module` this rank's shards of the parameters of `whole`, by its layouts."""
    param_layouts: dict[str, ParamLayout] = module.param_layouts  # type: ignore[assignment]
    for name, parameter in whole._parameters.items():
        layout = param_layouts[name].layout
        if parameter is not None and layout is not None:
            share = take_shard(parameter.detach(), layout, rank, dim=param_layouts[name].dim)
            # A copy, so that the whole parameter is freed.
            parameter = nn.Parameter(share.clone(memory_format=torch.contiguous_format))
        module.register_parameter(name, parameter)


def empty_parameters(
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Give `module` parameters of the shape of this rank's shards, with the memory as it was.

    Args:
        module: Layer with `param_layouts`.
        shapes: Shape of each whole parameter by name.
        rank: This rank.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """
    param_layouts: dict[str, ParamLayout] = module.param_layouts  # type: ignore[assignment]
    for name, shape in shapes.items():
        own, param_layout = list(shape), param_layouts[name]
        if param_layout.layout is not None:
            own[param_layout.dim] = param_layout.layout.sizes[rank]
        module.register_parameter(name, nn.Parameter(torch.empty(own, device=device, dtype=dtype)))
