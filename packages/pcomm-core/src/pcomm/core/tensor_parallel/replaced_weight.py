"""Linear layers whose weight is kept in another form: packed for the processor, or quantised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pcomm.core.errors import UnsupportedError

__all__ = [
    "WeightProduct",
    "check_no_gradient",
    "forget_weight",
    "replaced_linear",
    "replaced_product",
]


class WeightProduct(Protocol):
    """What computes `x W^T + b` for a weight that a layer does not hold itself.

    `layer.replace_weight(product)` is for inference: no gradient passes through. The parameter
    `weight` becomes one on the `meta` device, of the same shape and dtype and without memory, so
    that what asks for these goes on; `state_dict` and `load_state_dict` of the layer are refused.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of the weight."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., O]` of `x` `[..., I]`, in its dtype."""
        ...


def replaced_linear(layer: nn.Module, product: WeightProduct) -> Callable[[Any, Tensor], Tensor]:
    """A function of layer and input that computes with `product` and the layer's bias. Local."""
    forget_weight(layer, product)
    return partial(_with_bias, product)


def replaced_product(layer: nn.Module, product: WeightProduct) -> Callable[[Any, Tensor], Tensor]:
    """The same without the bias, for a layer that adds it after a sum over ranks. Local."""
    forget_weight(layer, product)
    return partial(_without_bias, product)


def forget_weight(layer: nn.Module, product: WeightProduct) -> None:
    """Put a parameter without memory in the place of `weight`, and refuse `state_dict`. Local.

    Args:
        layer: Module with a parameter `weight`, and a `bias` that may be None.
        product: The product that computes in its place, from then on the layer's attribute
            `weight_product`.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if not weight.is_meta:
        layer.register_state_dict_pre_hook(_refuse_save)
        layer.register_load_state_dict_pre_hook(_refuse_load)
    if isinstance(layer.bias, nn.Parameter):
        # Nothing of the layer is trained from here on.
        layer.bias.requires_grad_(False)
    layer.weight_product = product  # type: ignore[assignment]
    layer.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


def check_no_gradient(x: Tensor) -> None:
    """Refuse an input whose gradient would be lost. Local.

    Raises:
        UnsupportedError: The input requires a gradient.
    """
    if x.requires_grad:
        raise UnsupportedError(
            "a gradient through a linear layer whose weight was replaced",
            found=f"an input {list(x.shape)} that requires a gradient",
            why="The packed or quantised form of a weight has no backward.",
            fix="Train the model before its weights are replaced, or load it again; for "
            "inference call it under torch.inference_mode().",
        )


def _with_bias(product: WeightProduct, layer: Any, x: Tensor) -> Tensor:
    check_no_gradient(x)
    return product(x, layer.__dict__["_parameters"]["bias"])


def _without_bias(product: WeightProduct, layer: Any, x: Tensor) -> Tensor:
    check_no_gradient(x)
    return product(x, None)


def _refuse_save(_layer: nn.Module, prefix: str, _keep_vars: bool) -> None:
    raise _no_state("state_dict", prefix)


def _refuse_load(_layer: nn.Module, _state: Any, prefix: str, *_others: Any) -> None:
    raise _no_state("load_state_dict", prefix)


def _no_state(asked: str, prefix: str) -> UnsupportedError:
    return UnsupportedError(
        f"{asked}: {prefix}weight of a linear layer",
        found="a weight that was replaced by its packed or quantised form",
        why="That form is made for one processor, and the values that it was made from are gone.",
        fix="Save or load the state before the weights are replaced, or take it from the "
        "directory that the model was loaded from.",
    )
