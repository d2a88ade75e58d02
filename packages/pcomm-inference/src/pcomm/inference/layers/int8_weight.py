"""Weights as int8 numbers with a scale for each output, for decoding on a CPU."""

# Shape suffixes: I input features, O output features.

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.inference.layers.int8_product import int8_product
from pcomm.inference.layers.int8_rows import quantize_rows
from pcomm.inference.layers.linear_layers import linear_layers
from pcomm.inference.layers.replace_weights import replace_weights

__all__ = ["Int8Weight", "quantize_int8"]


class Int8Weight:
    """`x W^T + b`, where a row of W is int8 numbers times a scale; activations stay wide. Local.

    Args:
        weight_OI: Weight `[O, I]`, bf16, fp32 or fp64 on a CPU; it is not kept.

    Attributes:
        numbers_OI: Numbers `[O, I]`, int8, from -127 to 127.
        scales_O: Scales `[O]` of the rows, positive, dtype of the weight.

    Raises:
        ConfigError: A weight is NaN or infinite.
        UnsupportedError: The weight has another dtype, or is not on a CPU.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self.numbers_OI, self.scales_O = quantize_rows(weight_OI)

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.numbers_OI.nbytes + self.scales_O.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., O]` of `x` `[..., I]`, dtype of the weight.

        Raises:
            ConfigError: The input has another dtype than the weight had.
        """
        if x.dtype != self.scales_O.dtype:
            raise ConfigError(
                f"a linear layer with int8 weights of {self.scales_O.dtype}",
                found=f"an input of {x.dtype}",
                why="Scales have the dtype of the activations, and are not converted.",
                fix="Convert the model before quantize_int8, and give inputs of its dtype.",
            )
        rows = x
        if x.dim() != 2 or not x.is_contiguous():
            rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
        y = int8_product(rows, self.numbers_OI, self.scales_O)
        if bias is not None:
            y = y.add_(bias)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def quantize_int8(
    model: nn.Module, *, skip: Collection[str] = (), only: Collection[str] | None = None
) -> tuple[str, ...]:
    """Keep the weights of linear layers as int8 numbers, in place. Local.

    Symmetric, with one scale for each output; activations keep their dtype. Everything else stays:
    embeddings, norms, convolutions, parameters that a module multiplies by itself. An output layer
    whose weight is the embedding's gets int8 numbers of its own beside it. Layers are quantised one
    after the other, so that the old weight of one is freed before that of the next is read. They
    refuse `state_dict` and gradients from then on. Under tensor parallelism each rank calls it for
    its share: a scale is that of the row as the rank has it.

    Args:
        model: Model on a CPU, whose linear layers are `nn.Linear`, `ColumnParallelLinear` or
            `RowParallelLinear`, and no subclasses.
        skip: Names of modules that stay as they are with everything in them, such as
            `layers.0.router`; `*` stands for any characters.
        only: Names of the layers to quantise; None for all.

    Returns:
        Names of the layers that were quantised.

    Raises:
        ConfigError: There is no linear layer, a name of `skip` is that of no module, or a weight is
            NaN or infinite.
        UnsupportedError: A weight has another dtype than bf16, fp32 and fp64, or is not on a CPU.
    """
    layers = linear_layers(model, skip=skip, only=only)
    if not layers and only is None:
        raise ConfigError(
            f"quantize_int8: a {type(model).__name__}",
            found="no linear layer in it that is to be quantised",
            why="Weights of torch's nn.Linear and of pcomm's tensor-parallel layers are quantised, "
            "and each of them once.",
            fix="Pass a model with such layers, and leave some of them out of skip.",
        )
    return replace_weights(layers, Int8Weight)
