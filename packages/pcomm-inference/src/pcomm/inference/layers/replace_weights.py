"""Puts another form of their weights into the linear layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from torch import Tensor, nn

from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightProduct,
    check_no_gradient,
    forget_weight,
)

__all__ = ["replace_weights"]


def replace_weights(
    layers: dict[tuple[str, ...], nn.Module], make: Callable[[Tensor], WeightProduct | None]
) -> tuple[str, ...]:
    """Replace the weights of layers, one after another. Local.

    No more than one weight is there in two forms, except where another module keeps it, as the
    embedding does of a tied one. Layers that share one weight share what is made of it. A layer
    stays the module that it is, with its hooks and its bias.

    Args:
        layers: Layers from `linear_layers`, changed in place.
        make: Function of a weight `[O, I]`; None leaves the layer as it is.

    Returns:
        Names of the layers that were changed.
    """
    shared = _weights_of_several(layers.values())
    made: dict[int, WeightProduct | None] = {}
    # A weight whose product others wait for is kept, so that no other tensor can get its id.
    kept: list[Tensor] = []
    changed: list[tuple[str, ...]] = []
    for names, layer in layers.items():
        weight = layer.weight
        assert isinstance(weight, Tensor)
        key = id(weight)
        product = made[key] if key in made else make(weight.detach())
        if key in shared:
            made[key] = product
            kept.append(weight)
        del weight
        if product is not None:
            _replace(layer, product)
            changed.append(names)
    return tuple(chain.from_iterable(changed))


def _weights_of_several(layers: Iterable[nn.Module]) -> set[int]:
    """Ids of the weights that several layers share."""
    seen, shared = set[int](), set[int]()
    for layer in layers:
        (shared if id(layer.weight) in seen else seen).add(id(layer.weight))
    return shared


def _replace(layer: nn.Module, product: WeightProduct) -> None:
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        layer.replace_weight(product)
        return
    assert isinstance(layer, nn.Linear)
    forget_weight(layer, product)
    layer.forward = partial(_forward, product, layer.bias)  # type: ignore[method-assign]


def _forward(product: WeightProduct, bias: Tensor | None, x: Tensor) -> Tensor:
    check_no_gradient(x)
    return product(x, bias)
