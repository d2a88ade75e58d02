"""Puts another form of their weights into the linear layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from torch import Tensor, nn

from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightProduct,
    check_no_gradient,
    forget_weight,
)

__all__ = ["ReplacedLinear", "replace_weights"]


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


class ReplacedLinear(nn.Linear):
    """An `nn.Linear` whose weight was replaced: a layer becomes one in place, by its class."""

    weight_product: WeightProduct

    def forward(self, x: Tensor) -> Tensor:
        """`x W^T + b` with the product in place of the weight."""
        check_no_gradient(x)
        return self.weight_product(x, self.bias)


def _replace(layer: nn.Module, product: WeightProduct) -> None:
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        layer.replace_weight(product)
        return
    assert isinstance(layer, nn.Linear)
    forget_weight(layer, product)
    # Hooks, bias, copies and pickling stay those of a module; a function of the layer in the layer
    # would keep its memory until the garbage collector comes.
    layer.__class__ = ReplacedLinear
