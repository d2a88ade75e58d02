"""Linear layers split by output columns or by input rows."""

# Shape suffixes: T tokens, I input features, O output features; t, i, o one rank's shard.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.checks import (
    check_partition,
    check_rank_order,
    empty_parameters,
    take_parameters,
)
from pcomm.core.tensor_parallel.fast_module import FastModule
from pcomm.core.tensor_parallel.mappings import (
    add_up,
    enter,
    gather_replicated,
    gather_tokens,
    leave,
    scatter_tokens,
)
from pcomm.core.tensor_parallel.param_layout import ParamLayout
from pcomm.core.tensor_parallel.replaced_weight import (
    WeightProduct,
    replaced_linear,
    replaced_product,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(FastModule):
    """`y = x W^T + b` where each rank holds some of the outputs.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-gather of
    tokens under sequence parallelism, and a reduction of the input's gradient. Where no gradient
    is recorded there is no `autograd.Function` around either.

    Args:
        in_features: I, the number of inputs.
        layout: Layout of the O outputs; uneven shards and fused sections (queries, keys and
            values in one weight) are layouts like any other.
        collectives: Collectives of the tensor-parallel group, without gradients.
        bias: True adds a bias, split like the outputs.
        sequence_parallel: True if the input is this rank's shard of the tokens.
        gather_output: True gives every rank all outputs.
        initialise: False allocates this rank's parameters alone and leaves them as the memory was,
            for weights that are loaded; otherwise the whole weight is allocated first.
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
    multiply: Callable[[Any, Tensor], Tensor]

    def __init__(
        self,
        in_features: int,
        layout: Layout,
        collectives: Collectives,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        initialise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_partition("ColumnParallelLinear", layout, collectives)
        if gather_output:
            check_rank_order("ColumnParallelLinear: gather_output", layout)
        self.layout, self.collectives = layout, collectives
        self.param_layouts = {"weight": ParamLayout(layout), "bias": ParamLayout(layout)}
        _set_parameters(
            self, in_features, layout.length, bias, initialise, device=device, dtype=dtype
        )
        self.multiply = _linear
        if collectives.size == 1:
            self.run = _linear
            return
        self._enter = gather_tokens if sequence_parallel else enter
        self._gathers_tokens = sequence_parallel
        self.run = type(self)._split_and_gather if gather_output else type(self)._split

    def replace_weight(self, product: WeightProduct) -> None:
        """See `replaced_weight.WeightProduct`: `product` computes in place of the weight. Local."""
        self.multiply = replaced_linear(self, product)
        if self.collectives.size == 1:
            self.run = self.multiply

    def _split(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.multiply(self, self._enter(x, self.collectives))
        return self.multiply(self, self.collectives.all_gather(x) if self._gathers_tokens else x)

    def _split_and_gather(self, x: Tensor) -> Tensor:
        y = self._split(x)
        if torch.is_grad_enabled():
            return gather_replicated(y, self.layout, self.collectives)
        return self.collectives.all_gather(y, dim=-1, sizes=self.layout.sizes)


class RowParallelLinear(FastModule):
    """`y = x W^T + b` where each rank holds some of the inputs, and the results are summed.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-reduce, or a
    reduce-scatter of tokens under sequence parallelism. The bias is added once, after the sum.
    Where no gradient is recorded the all-reduce is in place, without an `autograd.Function`.

    Layers that decode are built without sequence parallelism: a step has any number of tokens, and
    the weights are the same.

    Args:
        layout: Layout of the I inputs, which is that of the outputs of the layer before.
        out_features: O, the number of outputs.
        collectives: Collectives of the tensor-parallel group, without gradients.
        bias: True adds a bias, whole on every rank.
        sequence_parallel: True if the output is this rank's shard of the tokens.
        initialise: False allocates this rank's parameters alone and leaves them as the memory was,
            for weights that are loaded; otherwise the whole weight is allocated first.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape: `[T, i]` to `[T, O]`, or `[T / size, O]` under sequence parallelism. Weight `[O, i]`.

    Raises:
        LayoutError: The layout is over another number of ranks, or no partition; when called, a
            number of tokens that is no multiple of the ranks under sequence parallelism.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    multiply: Callable[[Any, Tensor], Tensor]

    def __init__(
        self,
        layout: Layout,
        out_features: int,
        collectives: Collectives,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        initialise: bool = True,
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
        _set_parameters(
            self, layout.length, out_features, bias, initialise, device=device, dtype=dtype
        )
        self.multiply = _product
        if collectives.size == 1:
            self.run = _linear
            return
        self._leave = scatter_tokens if sequence_parallel else leave
        self._scatters_tokens = sequence_parallel
        self.run = type(self)._split

    def replace_weight(self, product: WeightProduct) -> None:
        """See `replaced_weight.WeightProduct`: `product` computes in place of the weight. Local."""
        if self.collectives.size == 1:
            self.run = replaced_linear(self, product)
        else:
            self.multiply = replaced_product(self, product)

    def _split(self, x: Tensor) -> Tensor:
        y = self.multiply(self, x)
        if torch.is_grad_enabled():
            y = self._leave(y, self.collectives)
        else:
            y = add_up(y, self.collectives, scatters_tokens=self._scatters_tokens)
        # Under autocast y is narrower than the bias, and F.linear does not widen it either.
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _set_parameters(
    module: ColumnParallelLinear | RowParallelLinear,
    in_features: int,
    out_features: int,
    bias: bool,
    initialise: bool,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    rank = module.collectives.rank
    if initialise:
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        take_parameters(module, whole, rank)
        return
    shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
    if bias:
        shapes["bias"] = (out_features,)
    else:
        module.register_parameter("bias", None)
    empty_parameters(module, shapes, rank, device=device, dtype=dtype)


def _linear(module: ColumnParallelLinear | RowParallelLinear, x: Tensor) -> Tensor:
    own = module.__dict__["_parameters"]
    try:
        return F.linear(x, own["weight"], own["bias"])
    except KeyError:
        # A parametrization (weight norm, for example) has put something else in its place.
        return F.linear(x, module.weight, module.bias)


def _product(module: RowParallelLinear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)
