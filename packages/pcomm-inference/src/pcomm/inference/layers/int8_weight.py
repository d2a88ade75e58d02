"""Weights as int8 numbers with a scale for each output, for decoding on a CPU."""

# Shape suffixes: M rows of activations, I input features, O output features.

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.layers.linear_layers import check_input, linear_layers, replace_weights

__all__ = ["Int8Weight", "quantize_int8", "quantize_rows"]


# The least int8 number is not used, so that a row and its negative have negative numbers.
_LARGEST = 127
# Elements that are converted at once: a copy of them in fp32 is small beside a large matrix.
_CONVERTED = 2**18
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


# Rows up to which torch's kernel for int8 is used. It converts each weight anew for every four rows
# and so takes longer for many of them than converting all weights once. The two were equal at
# 16 rows on one thread, and at 32 on two.
_MOST_ROWS = 16
# Weights that are converted at once for more rows: 2 MiB of them in bf16.
_CONVERTED_FOR_PRODUCT = 2**20
# The kernel for bf16 reads the inputs in parts of so many, and behind the end of the last one.
_INPUTS = 16
# Bytes to which that kernel wants activations aligned; with others the process dies.
_ALIGNMENT = 64


def quantize_int8(
    model: nn.Module, *, skip: Collection[str] = (), only: Collection[str] | None = None
) -> tuple[str, ...]:
    """Keep the weights of linear layers as int8 numbers, in place. Local.

    Symmetric, with one scale for each output; activations keep their dtype. Everything else stays:
    embeddings, norms, convolutions, parameters that a module multiplies by itself. An output layer
    whose weight is the embedding's gets int8 numbers of its own beside it. Layers are quantised one
    after the other, so that the old weight of one is freed before that of the next is read. They
    refuse `state_dict`, gradients and conversions from then on. Under tensor parallelism each rank
    calls it for its share: a scale is that of the row as the rank has it.

    Args:
        model: Model on a CPU, whose linear layers are `nn.Linear`, `ColumnParallelLinear` or
            `RowParallelLinear`, and no subclasses.
        skip: Names of modules that stay as they are with everything in them, such as
            `layers.0.router`, or one name; `*` stands for any characters.
        only: Names of the layers to quantise, or one name; None for all.

    Returns:
        Names of the layers that were quantised.

    Raises:
        ConfigError: There is no linear layer, a name of `skip` is that of no module, one of `only`
            that of no linear layer, or a weight is NaN or infinite.
        UnsupportedError: A weight has another dtype than bf16, fp32 and fp64, or is not on a CPU.
            After an error all layers are as they were.
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
    return replace_weights(model, layers, Int8Weight, _check)


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
            ConfigError: The input has another dtype, device or width than the weight had.
        """
        check_input(x, "int8 weights", self.numbers_OI.shape[1], self.scales_O.dtype)
        rows = x
        if x.dim() != 2 or not x.is_contiguous():
            rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
        y = _int8_product(rows, self.numbers_OI, self.scales_O)
        if bias is not None:
            y = y.add_(bias)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def quantize_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales whose products are nearest to a matrix. Local.

    A weight differs from its number times its scale by at most half a scale. The scale of a row is
    its largest magnitude over 127, rounded to the dtype of the matrix before numbers are chosen.

    Args:
        weight_OI: `[O, I]`, bf16, fp32 or fp64, on a CPU; without gradients.

    Returns:
        int8 `[O, I]`, numbers from -127 to 127; and `[O]`, positive, dtype of the matrix.

    Raises:
        ConfigError: A weight is NaN or infinite.
        UnsupportedError: The matrix has another dtype, or lies on another device.
    """
    _check(weight_OI)
    numbers_OI = torch.empty_like(
        weight_OI, dtype=torch.int8, memory_format=torch.contiguous_format
    )
    scales_O = weight_OI.new_empty(weight_OI.shape[0])
    num_rows = max(1, _CONVERTED // max(1, weight_OI.shape[1]))
    for weight, numbers, scales in zip(
        weight_OI.split(num_rows), numbers_OI.split(num_rows), scales_O.split(num_rows), strict=True
    ):
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        scales.copy_(_largest(wide) / _LARGEST)
        # A row of zeros, or of weights too small for a scale, has zeros with any scale.
        scales.masked_fill_(scales == 0, 1.0)
        steps = wide / scales.to(wide.dtype).unsqueeze(1)
        numbers.copy_(steps.round_().clamp_(-_LARGEST, _LARGEST))
    return numbers_OI, scales_O


def _largest(wide: Tensor) -> Tensor:
    if not wide.shape[1]:
        return wide.new_zeros(wide.shape[0])
    return wide.abs().amax(1)


def _check(weight_OI: Tensor) -> None:
    if weight_OI.dtype not in _DTYPES:
        raise UnsupportedError(
            f"quantize_int8: a weight of {weight_OI.dtype}",
            found="neither bf16 nor fp32 nor fp64",
            why="Scales have the dtype of the activations, and those of small rows vanish in fp16.",
            fix="Convert the model first: model.to(torch.bfloat16), or dtype bfloat16 when it is "
            "loaded.",
        )
    if not weight_OI.is_cpu:
        raise UnsupportedError(
            f"quantize_int8: a weight on {weight_OI.device}",
            found="a device that is no CPU",
            why="The products are made by a kernel of torch for CPUs.",
            fix="Move the model to a CPU, or leave its weights as they are.",
        )
    if weight_OI.numel() and not torch.stack(weight_OI.aminmax()).isfinite().all():
        raise ConfigError(
            "quantize_int8: a weight",
            found="NaN or infinity",
            why="No scale makes numbers of it.",
            fix="Check the weights where they come from.",
        )


def _int8_product(x_MI: Tensor, numbers_OI: Tensor, scales_O: Tensor) -> Tensor:
    """`x (scales * numbers)^T`, with activations as they are. Local; without gradients.

    Up to 16 rows are multiplied by torch's kernel for int8. For more of them the numbers, which all
    dtypes of activations have exactly, are converted a few rows of the matrix at a time. The two
    add up in other orders, and the second one rounds before it scales.

    Args:
        x_MI: `[M, I]`, activations; neighbours in a row are neighbours in memory.
        numbers_OI: `[O, I]`, int8, contiguous.
        scales_O: `[O]`, dtype of the activations.

    Returns:
        `[M, O]`, contiguous, dtype of the activations.
    """
    num_rows, inputs = x_MI.shape
    has_kernel = x_MI.dtype is not torch.float64 and not inputs % _INPUTS
    if has_kernel and 0 < num_rows <= _MOST_ROWS:
        if x_MI.data_ptr() % _ALIGNMENT:
            x_MI = x_MI.clone()
        return torch._weight_int8pack_mm(x_MI, numbers_OI, scales_O)
    y_MO = x_MI.new_empty(num_rows, numbers_OI.shape[0])
    at_once = max(1, _CONVERTED_FOR_PRODUCT // max(1, inputs))
    converted = x_MI.new_empty(min(at_once, numbers_OI.shape[0]), inputs)
    for start in range(0, numbers_OI.shape[0], at_once):
        numbers = numbers_OI[start : start + at_once]
        # Into memory that is there: of a new tensor each page would be mapped first.
        part = converted[: numbers.shape[0]].copy_(numbers)
        torch.mm(x_MI, part.T, out=y_MO[:, start : start + at_once])
    return y_MO.mul_(scales_O)
