"""The product of activations with a matrix of int8 numbers, on a CPU."""

# Shape suffixes: M rows of activations, I inputs, O outputs.

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["int8_product"]

# Rows up to which torch's kernel for int8 is used. It converts each weight anew for every four rows
# and so takes longer for many of them than converting all weights once. The two were equal at
# 16 rows on one thread, and at 32 on two.
_MOST_ROWS = 16
# Weights that are converted at once for more rows: 2 MiB of them in bf16.
_CONVERTED = 2**20
# The kernel for bf16 reads the inputs in parts of so many, and behind the end of the last one.
_INPUTS = 16
# Bytes to which that kernel wants activations aligned; with others the process dies.
_ALIGNMENT = 64


def int8_product(x_MI: Tensor, numbers_OI: Tensor, scales_O: Tensor) -> Tensor:
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
    at_once = max(1, _CONVERTED // max(1, inputs))
    converted = x_MI.new_empty(min(at_once, numbers_OI.shape[0]), inputs)
    for start in range(0, numbers_OI.shape[0], at_once):
        numbers = numbers_OI[start : start + at_once]
        # Into memory that is there: of a new tensor each page would be mapped first.
        part = converted[: numbers.shape[0]].copy_(numbers)
        torch.mm(x_MI, part.T, out=y_MO[:, start : start + at_once])
    return y_MO.mul_(scales_O)
