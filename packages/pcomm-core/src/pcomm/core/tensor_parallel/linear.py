"""Linear layers split by output columns or by input rows."""

# Shape suffixes: T tokens, I input features, O output features; t, i, o one rank's shard.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.checks import check_partition, check_rank_order, take_parameters
from pcomm.core.tensor_parallel.fast_module import FastModule
from pcomm.core.tensor_parallel.mappings import (
    enter,
    gather_replicated,
    gather_tokens,
    leave,
    scatter_tokens,
)
from pcomm.core.tensor_parallel.param_layout import ParamLayout

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(FastModule):
    """`y = x W^T + b` where each rank holds some of the outputs.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-gather of
    tokens under sequence parallelism, and a reduction of the input's gradient.

    Args:
        in_features: I, the number of inputs.
        layout: Layout of the O outputs; uneven shards and fused sections (queries, keys and
            values in one weight) are layouts like any other.
        collectives: Collectives of the tensor-parallel group, without gradients.
        bias: True adds a bias, split like the outputs.
        sequence_parallel: True if the input is this rank's shard of the tokens.
        gather_output: True gives every rank all outputs.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape: `[T, I]` (`[T / size, I]` under sequence parallelism) to `[T, o]`, or `[T, O]`
    gathered. Weight `[o, I]`, initialised like `nn.Linear` from the whole weight, so that ranks
    with equal random state hold parts of one weight.

    Raises:
        LayoutError: The layout is over another number of ranks, no partition, or, where the
            output is gathered, not in rank order.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

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
        check_partition("ColumnParallelLinear", layout, collectives)
        if gather_output:
            check_rank_order("ColumnParallelLinear: gather_output", layout)
        self.layout, self.collectives = layout, collectives
        self.param_layouts = {"weight": ParamLayout(layout), "bias": ParamLayout(layout)}
        whole = nn.Linear(in_features, layout.length, bias=bias, device=device, dtype=dtype)
        take_parameters(self, whole, collectives.rank)
        if collectives.size == 1:
            self.run = _linear
            return
        self._enter = gather_tokens if sequence_parallel else enter
        self.run = type(self)._split_and_gather if gather_output else type(self)._split

    def _split(self, x: Tensor) -> Tensor:
        return _linear(self, self._enter(x, self.collectives))

    def _split_and_gather(self, x: Tensor) -> Tensor:
        return gather_replicated(self._split(x), self.layout, self.collectives)


class RowParallelLinear(FastModule):
    """`y = x W^T + b` where each rank holds some of the inputs, and the results are summed.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-reduce, or a
    reduce-scatter of tokens under sequence parallelism. The bias is added once, after the sum.

    Args:
        layout: Layout of the I inputs, which is that of the outputs of the layer before.
        out_features: O, the number of outputs.
        collectives: Collectives of the tensor-parallel group, without gradients.
        bias: True adds a bias, whole on every rank.
        sequence_parallel: True if the output is this rank's shard of the tokens.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape: `[T, i]` to `[T, O]`, or `[T / size, O]` under sequence parallelism. Weight `[O, i]`.

    Raises:
        LayoutError: The layout is over another number of ranks, or no partition.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

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
        check_partition("RowParallelLinear", layout, collectives)
        self.layout, self.collectives = layout, collectives
        self.param_layouts = {
            "weight": ParamLayout(layout, dim=1),
            "bias": ParamLayout(has_partial_gradient=sequence_parallel and collectives.size > 1),
        }
        whole = nn.Linear(layout.length, out_features, bias=bias, device=device, dtype=dtype)
        take_parameters(self, whole, collectives.rank)
        if collectives.size == 1:
            self.run = _linear
            return
        self._leave = scatter_tokens if sequence_parallel else leave
        self.run = type(self)._split

    def _split(self, x: Tensor) -> Tensor:
        y = self._leave(F.linear(x, self.weight), self.collectives)
        # Under autocast y is narrower than the bias, and F.linear does not widen it either.
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _linear(module: ColumnParallelLinear | RowParallelLinear, x: Tensor) -> Tensor:
    own = module.__dict__["_parameters"]
    try:
        return F.linear(x, own["weight"], own["bias"])
    except KeyError:
        # A parametrization (weight norm, for example) has put something else in its place.
        return F.linear(x, module.weight, module.bias)
