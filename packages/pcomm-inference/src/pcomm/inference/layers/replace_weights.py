"""Finds the linear layers of a model, and puts another form of their weights into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightProduct,
    check_no_gradient,
    forget_weight,
)

__all__ = ["replace_weights"]


def replace_weights(model: nn.Module, make: Callable[[Tensor], WeightProduct | None]) -> int:
    """Replace the weights of all `nn.Linear` and tensor-parallel linear layers. Local.

    A subclass of these is left alone, for it may compute something else, and so is a layer whose
    weight is made by a parametrization or was replaced before. Layers that share one weight share
    what is made of it.

    Args:
        model: Model, changed in place, one layer after another, so that no more than one weight is
            there in two forms, except where another module keeps it (a tied embedding).
        make: Function of a weight `[O, I]`; None leaves the layer as it is.

    Returns:
        The number of layers that were changed.
    """
    made: dict[int, tuple[Tensor, WeightProduct | None]] = {}
    shared = _weights_of_several(model)
    count = 0
    for layer in model.modules():
        if not _has_own_weight(layer):
            continue
        weight = layer.weight
        assert isinstance(weight, Tensor)
        known = made.get(id(weight))
        product = make(weight.detach()) if known is None else known[1]
        if id(weight) in shared:
            # Kept, so that no other tensor can get its id.
            made[id(weight)] = (weight, product)
        if product is not None:
            _replace(layer, product)
            count += 1
    return count


def _has_own_weight(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, ColumnParallelLinear, RowParallelLinear):
        return False
    weight = layer._parameters.get("weight")
    return weight is not None and not weight.is_meta


def _weights_of_several(model: nn.Module) -> set[int]:
    """Ids of the weights that several linear layers share."""
    ids = [id(layer.weight) for layer in model.modules() if _has_own_weight(layer)]
    return {one for one in ids if ids.count(one) > 1} if len(set(ids)) < len(ids) else set()


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
