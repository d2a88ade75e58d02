"""A matrix as int8 numbers and one scale for each of its rows."""

# Shape suffixes: O rows, which are outputs of a linear layer; I columns, its inputs.

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = ["quantize_rows"]

# The least int8 number is not used, so that a row and its negative have negative numbers.
_LARGEST = 127
# Elements that are converted at once: a copy of them in fp32 is small beside a large matrix.
_CONVERTED = 2**18

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


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
    largest = wide.abs().amax(1)
    if not largest.isfinite().all():
        raise ConfigError(
            "quantize_int8: a weight",
            found="NaN or infinity",
            why="No scale makes numbers of it.",
            fix="Check the weights where they come from.",
        )
    return largest


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
