"""Linear layers split by output columns or by input rows."""

# Shape suffixes: T tokens, I input features, O output features; t, i, o one rank's share.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.placement import Placement, take_shard
from pcomm.core.tensor_parallel.direct import DirectModule
from pcomm.core.tensor_parallel.regions import (
    enter,
    gather_columns,
    gather_tokens,
    leave,
    scatter_tokens,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(DirectModule):
    """`y = x W^T + b` where each rank holds some of the outputs.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-gather of
    tokens under sequence parallelism, and a reduction of the input's gradient.

    Args:
        in_features: I.
        layout: Which rank computes which of the O outputs; uneven shares and fused sections
            (queries, keys and values in one weight) are layouts like any other.
        collectives: Of the tensor-parallel group, without gradients.
        bias: Whether there is a bias, split like the outputs.
        sequence_parallel: Whether the input holds this rank's share of the tokens.
        gather_output: Whether every rank gets all outputs.
        device: Where the parameters are.
        dtype: Of the parameters.

    Shape: `[T, I]` (`[T / size, I]` under sequence parallelism) to `[T, o]`, or `[T, O]`
    gathered. Weight `[o, I]`, initialised like `nn.Linear` from the whole weight, so that ranks
    with equal random state hold parts of one weight.

    Raises:
        LayoutError: The layout is over another number of ranks.
    """

    def __init__(
        self,
        in_features: int,
        layout: Layout,
        collectives: Collectives,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_ranks("ColumnParallelLinear", layout, collectives)
        self.layout, self.collectives = layout, collectives
        self.placements = {"weight": Placement(layout), "bias": Placement(layout)}
        whole = nn.Linear(in_features, layout.length, bias=bias, device=device, dtype=dtype)
        take_parameters(self, whole, collectives.rank)
        if collectives.size == 1:
            self.run = self._alone
            return
        self._enter = gather_tokens if sequence_parallel else enter
        self.run = self._split_and_gather if gather_output else self._split

    def _alone(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        return F.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]

    def _split(self, x: Tensor) -> Tensor:
        return self._alone(self._enter(x, self.collectives))

    def _split_and_gather(self, x: Tensor) -> Tensor:
        return gather_columns(self._split(x), self.layout, self.collectives)


class RowParallelLinear(DirectModule):
    """`y = x W^T + b` where each rank holds some of the inputs, and the results are summed.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-reduce, or a
    reduce-scatter of tokens under sequence parallelism. The bias is added once, after the sum.

    Args:
        layout: Which rank holds which of the I inputs: that of the layer before.
        out_features: O.
        collectives: Of the tensor-parallel group, without gradients.
        bias: Whether there is a bias, whole on every rank.
        sequence_parallel: Whether the output is this rank's share of the tokens.
        device: Where the parameters are.
        dtype: Of the parameters.

    Shape: `[T, i]` to `[T, O]`, or `[T / size, O]` under sequence parallelism. Weight `[O, i]`.

    Raises:
        LayoutError: The layout is over another number of ranks.
    """

    def __init__(
        self,
        layout: Layout,
        out_features: int,
        collectives: Collectives,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_ranks("RowParallelLinear", layout, collectives)
        self.layout, self.collectives = layout, collectives
        self.placements = {
            "weight": Placement(layout, dim=1),
            "bias": Placement(has_partial_gradient=sequence_parallel and collectives.size > 1),
        }
        whole = nn.Linear(layout.length, out_features, bias=bias, device=device, dtype=dtype)
        take_parameters(self, whole, collectives.rank)
        if collectives.size == 1:
            self.run = self._alone
            return
        self._leave = scatter_tokens if sequence_parallel else leave
        self.run = self._split

    def _alone(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        return F.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]

    def _split(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        y = self._leave(F.linear(x, parameters["weight"]), self.collectives)  # type: ignore[arg-type]
        bias = parameters["bias"]
        return y if bias is None else y + bias


def check_ranks(layer: str, layout: Layout, collectives: Collectives) -> None:
    """Refuse a layout made for another number of ranks than the group has."""
    if layout.size != collectives.size:
        raise LayoutError(
            f"{layer}: a layout over {layout.size} ranks",
            found=f"a group of {collectives.size}",
            why="The layout names the share of every rank of the group.",
            fix="Build the layout with the size of the group.",
        )


def take_parameters(module: DirectModule, whole: nn.Module, rank: int) -> None:
    """Give `module` this rank's share of the parameters of `whole`, by its placements."""
    placements: dict[str, Placement] = module.placements  # type: ignore[assignment]
    for name, parameter in whole._parameters.items():
        placement = placements[name]
        if parameter is None or placement.layout is None:
            module.register_parameter(name, parameter)
            continue
        share = take_shard(parameter.detach(), placement.layout, rank, dim=placement.dim)
        module.register_parameter(name, nn.Parameter(share.contiguous().clone()))
