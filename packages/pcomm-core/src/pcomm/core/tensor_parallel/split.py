"""How a parameter and an activation are split over the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pcomm.core.collectives.autograd import with_adjoint
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout

__all__ = [
    "ParamLayout",
    "add_up",
    "check_ids",
    "check_partition",
    "check_rank_order",
    "empty_parameters",
    "enter",
    "first_position",
    "gather_replicated",
    "gather_tokens",
    "join_shards",
    "leave",
    "param_layouts_of",
    "room_for_sum",
    "scatter_tokens",
    "split_replicated",
    "take_parameters",
    "take_shard",
]


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


# Shape suffixes: T tokens, D columns; x_t is one rank's shard of x_T.


def enter(x: Tensor, collectives: Collectives) -> Tensor:
    """`x`, replicated, into a computation that every rank does in part. Collective in backward."""
    return with_adjoint(x, lambda x: x, lambda gradient: leave(gradient, collectives))


def leave(x: Tensor, collectives: Collectives) -> Tensor:
    """The sum of the ranks' partial results, replicated. Collective in forward."""
    return with_adjoint(x, collectives.all_reduce, lambda gradient: enter(gradient, collectives))


def gather_tokens(x_tD: Tensor, collectives: Collectives) -> Tensor:
    """All tokens `[T, D]` from each rank's shard `[T / size, D]`. Collective both ways."""
    return with_adjoint(
        x_tD, collectives.all_gather, lambda gradient: scatter_tokens(gradient, collectives)
    )


def scatter_tokens(x_TD: Tensor, collectives: Collectives) -> Tensor:
    """This rank's tokens of the sum of partial results. Collective both ways."""
    return with_adjoint(
        x_TD, collectives.reduce_scatter, lambda gradient: gather_tokens(gradient, collectives)
    )


def gather_replicated(
    x: Tensor, layout: Layout, collectives: Collectives, *, dim: int = -1
) -> Tensor:
    """The whole tensor, replicated, from each rank's shard. Collective in forward.

    Args:
        x: This rank's shard, of any shape.
        layout: Layout of `dim`, whose shards lie in rank order.
        collectives: Collectives of the group that shares the tensor.
        dim: Dimension that is split: the last one, of columns, or 0, of tokens.

    Raises:
        LayoutError: The layout's shards do not lie in rank order.
    """
    check_rank_order("gather_replicated", layout)
    return with_adjoint(
        x,
        lambda x: collectives.all_gather(x, dim=dim, sizes=layout.sizes),
        lambda gradient: split_replicated(gradient, layout, collectives, dim=dim),
    )


def split_replicated(
    x: Tensor, layout: Layout, collectives: Collectives, *, dim: int = -1
) -> Tensor:
    """This rank's shard of a replicated tensor, a view where it can be. Collective in backward.

    Args:
        x: The whole tensor, the same on all ranks.
        layout: Layout of `dim`, whose shards lie in rank order.
        collectives: Collectives of the group that shares the tensor.
        dim: Dimension that is split: the last one, of columns, or 0, of tokens.

    Raises:
        LayoutError: The layout's shards do not lie in rank order.
    """
    check_rank_order("split_replicated", layout)
    return with_adjoint(
        x,
        lambda x: take_shard(x, layout, collectives.rank, dim=dim),
        lambda gradient: gather_replicated(gradient, layout, collectives, dim=dim),
    )


def room_for_sum(
    shape: Sequence[int], like: Tensor, collectives: Collectives, *, scatters_tokens: bool
) -> Tensor | None:
    """Memory for partial results, which `add_up` does not copy; None where any memory is as good.

    Local. They are written at once, and then passed to `add_up` with `in_place=False`.

    Args:
        shape: Shape of the partial results.
        like: Tensor of their dtype and device.
        collectives: Collectives of the tensor-parallel group.
        scatters_tokens: True for this rank's tokens alone.
    """
    if not scatters_tokens:
        if like.is_cpu and collectives.size > 2:
            return None
        return collectives.empty_input("all_reduce", shape, like)
    if shape[0] % collectives.size:
        return None
    return collectives.empty_input("reduce_scatter", shape, like)


def add_up(
    x: Tensor, collectives: Collectives, *, scatters_tokens: bool, in_place: bool = True
) -> Tensor:
    """What `leave` or `scatter_tokens` returns, where no gradient is recorded. Collective.

    On a CPU the sum for a token does not depend on how many others there are. Gloo's all-reduce
    adds up each element in an order that depends on its place, which two ranks cannot tell apart.

    Args:
        x: Partial results of this rank.
        collectives: Collectives of the tensor-parallel group.
        scatters_tokens: True for this rank's tokens alone.
        in_place: True has an all-reduce overwrite `x`; False gives a new tensor.

    Raises:
        LayoutError: The ranks cannot get equal numbers of the tokens; on all ranks, before any
            communication.
    """
    if not scatters_tokens:
        if x.is_cpu and collectives.size > 2:
            return _sum_in_rank_order(x, collectives)
        return collectives.all_reduce(x, out=x if in_place else None)
    if x.shape[0] % collectives.size:
        raise LayoutError(
            f"a layer with sequence_parallel=True, without gradients: {x.shape[0]} tokens",
            found=f"{collectives.size} ranks",
            why="Each rank gets as many tokens as every other, and the next layer cannot see how "
            "many the others have.",
            fix="Build the layers that decode with sequence_parallel=False: their weights are the "
            "same, and they take any number of tokens.",
        )
    return collectives.reduce_scatter(x)


def _sum_in_rank_order(x: Tensor, collectives: Collectives) -> Tensor:
    parts = collectives.all_gather(x.unsqueeze(0)).unbind(0)
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)
