"""Tensor-parallel layers beside the plain layer that their joined weights make.

For tests of the layers, and of new implementations of `Collectives`, over which they run.
"""

# Shape suffixes: T tokens, I input features, O output features.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.split import (
    ParamLayout,
    join_shards,
    param_layouts_of,
    take_shard,
)
from pcomm.core.tensor_parallel.vocabulary import VocabularyParallelEmbedding

__all__ = ["Comparison", "LayerCase", "compare_layer"]

Layer = ColumnParallelLinear | RowParallelLinear | VocabularyParallelEmbedding


@dataclass(frozen=True)
class LayerCase:
    """A layer, how it is split, and how many tokens go through it.

    Args:
        kind: Name of the layer.
        layout: Layout of the outputs of a column-parallel layer, of the inputs of a row-parallel
            one, or of the vocabulary of an embedding.
        bias: True gives the linear layers a bias.
        sequence_parallel: True if tokens are split outside the layer.
        gather_output: Option of the column-parallel layer.
        tokens: T, a multiple of the ranks under sequence parallelism.
        width: The dimension that is not split.
    """

    kind: Literal["column", "row", "embedding"]
    layout: Layout
    bias: bool = False
    sequence_parallel: bool = False
    gather_output: bool = False
    tokens: int = 12
    width: int = 5

    def build(self, collectives: Collectives, dtype: torch.dtype) -> Layer:
        """The layer as a program makes it."""
        if self.kind == "embedding":
            return VocabularyParallelEmbedding(
                self.layout,
                self.width,
                collectives,
                sequence_parallel=self.sequence_parallel,
                dtype=dtype,
            )
        if self.kind == "row":
            return RowParallelLinear(
                self.layout,
                self.width,
                collectives,
                bias=self.bias,
                sequence_parallel=self.sequence_parallel,
                dtype=dtype,
            )
        return ColumnParallelLinear(
            self.width,
            self.layout,
            collectives,
            bias=self.bias,
            sequence_parallel=self.sequence_parallel,
            gather_output=self.gather_output,
            dtype=dtype,
        )

    def own_input(self, whole: Tensor, rank: int) -> Tensor:
        """What `rank` feeds into the layer."""
        if self.kind == "row":
            return take_shard(whole, self.layout, rank, dim=-1)
        return self._own_tokens(whole, rank) if self.kind == "column" else whole

    def own_output(self, whole: Tensor, rank: int) -> Tensor:
        """What `rank` gets out of it."""
        if self.kind != "column":
            return self._own_tokens(whole, rank)
        return whole if self.gather_output else take_shard(whole, self.layout, rank, dim=-1)

    def _own_tokens(self, whole: Tensor, rank: int) -> Tensor:
        if not self.sequence_parallel:
            return whole
        return take_shard(whole, Layout.even(self.tokens, self.layout.size), rank)


@dataclass(frozen=True)
class Comparison:
    """One result of a layer on this rank, beside the same part of the plain layer's.

    Args:
        name: `"output"`, `"input gradient"`, or a parameter's name and `" gradient"`.
        actual: Results of the split layer.
        plain: Results of the plain layer in the same dtype.
        exact: Results of the plain layer in float64.
        magnitude: Largest sum of absolute values behind an element, for `assert_close`.
    """

    name: str
    actual: Tensor
    plain: Tensor
    exact: Tensor
    magnitude: float


def compare_layer(
    case: LayerCase, collectives: Collectives, dtype: torch.dtype, *, seed: int = 0
) -> list[Comparison]:
    """Output and all gradients of a split layer and of the plain one. Collective.

    Inputs and upstream gradients are the same on all ranks and, where the layer's part of them
    is a view, not contiguous.
    """
    layer, rank = case.build(collectives, dtype), collectives.rank
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    for parameter in layer.parameters():
        parameter.detach().copy_(torch.randn(parameter.shape, generator=generator))
    param_layouts = param_layouts_of(layer)
    wholes = {
        name: _joined(parameter.detach(), param_layouts[name], collectives)
        for name, parameter in layer.named_parameters()
    }
    if case.bias and case.kind == "row":
        layer.load_state_dict({"bias": wholes["bias"]}, strict=False)
    x, upstream_TO = _example(case, dtype, 1000 * seed)

    own = case.own_input(x, rank).detach()
    inputs = [own.requires_grad_()] if own.is_floating_point() else []
    output = layer(own)
    found = torch.autograd.grad(
        output, [*inputs, *layer.parameters()], case.own_output(upstream_TO, rank)
    )
    actual = [output.detach(), *found]
    plain = _plain(case, wholes, x, upstream_TO, dtype)
    exact = _plain(case, wholes, x, upstream_TO, torch.float64)
    # The same with every number replaced by its magnitude: nothing cancels.
    sizes = {name: whole.abs() for name, whole in wholes.items()}
    magnitudes = _plain(case, sizes, x.abs(), upstream_TO.abs(), torch.float64)

    parts: list[tuple[str, Callable[[Tensor], Tensor]]]
    parts = [("output", lambda whole: case.own_output(whole, rank))]
    if inputs:
        parts.append(("input gradient", lambda whole: case.own_input(whole, rank)))
    for name in wholes:
        param_layout = param_layouts[name]
        if param_layout.has_partial_gradient:
            actual[len(parts)] = collectives.all_reduce(actual[len(parts)])
        parts.append((f"{name} gradient", _part(param_layout, rank)))
    return [
        Comparison(name, mine, part(theirs), part(best), float(size.max()) if size.numel() else 0.0)
        for (name, part), mine, theirs, best, size in zip(
            parts, actual, plain, exact, magnitudes, strict=True
        )
    ]


def _example(case: LayerCase, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """An input and an upstream gradient, laid out column by column."""
    generator = torch.Generator().manual_seed(seed)
    length, outputs = (
        case.layout.length,
        case.layout.length if case.kind == "column" else case.width,
    )
    upstream_TO = torch.randn(outputs, case.tokens, generator=generator).t().to(dtype)
    if case.kind == "embedding":
        return torch.randint(length, (case.tokens,), generator=generator), upstream_TO
    inputs = case.width if case.kind == "column" else length
    return torch.randn(inputs, case.tokens, generator=generator).t().to(dtype), upstream_TO


def _plain(
    case: LayerCase, wholes: dict[str, Tensor], x: Tensor, upstream_TO: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output, gradient of the input if it has one, and of each parameter, on one rank."""
    parameters = [whole.to(dtype).requires_grad_() for whole in wholes.values()]
    if case.kind == "embedding":
        output, inputs = F.embedding(x, parameters[0]), []
    else:
        inputs = [x.detach().to(dtype).requires_grad_()]
        output = F.linear(inputs[0], *parameters)
    gradients = torch.autograd.grad(output, [*inputs, *parameters], upstream_TO.to(dtype))
    return [output.detach(), *gradients]


def _joined(share: Tensor, param_layout: ParamLayout, collectives: Collectives) -> Tensor:
    """The whole parameter from every rank's shard; rank 0's where all hold it."""
    layout, dim = param_layout.layout, param_layout.dim
    if layout is None:
        return collectives.broadcast(share)
    shares = collectives.all_gather(share, dim=dim, sizes=layout.sizes)
    return join_shards(shares.split(list(layout.sizes), dim), layout, dim=dim)


def _part(param_layout: ParamLayout, rank: int) -> Callable[[Tensor], Tensor]:
    layout = param_layout.layout
    if layout is None:
        return lambda whole: whole
    return lambda whole: take_shard(whole, layout, rank, dim=param_layout.dim)
