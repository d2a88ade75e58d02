"""The residual stream and its norm, as the fused operations compute them, by torch alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LARGEST_E4M3", "NormedRows", "fp8_rows", "rms_norm"]

LARGEST_E4M3 = 448.0
"""The largest number of `torch.float8_e4m3fn`."""

_SMALLEST_SCALE = 2.0**-64


class NormedRows(NamedTuple):
    """What a fused operation returns.

    Attributes:
        rows: Normed rows `[tokens, hidden]`, in the dtype of the input or `torch.float8_e4m3fn`.
        residual: Sum of the addends of all ranks and the residual, in the dtype of the input.
        scales: fp32 scale of each row, `[tokens]`; a row is its fp8 numbers times its scale. None
            without them, or where the scale was given.
    """

    rows: Tensor
    residual: Tensor
    scales: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in fp32 and rounded once. Local.

    That of `torch.nn.functional.rms_norm`, with a root that is rounded as IEEE 754 says on every
    device, as in the kernels. The mean is the sum times the reciprocal of the length, as in torch's
    kernels for GPUs. Only the order in which squares are added may differ from ours.
    """
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True) * (1 / max(1, x.shape[-1]))
    # Torch's root of fp32 on a CPU may be off by one digit; through fp64 it is not.
    inverse = (mean + eps).double().sqrt().float().reciprocal()
    return (wide * inverse * weight.float()).to(x.dtype)


def fp8_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows as `torch.float8_e4m3fn`, and the scales that they are to be multiplied by. Local.

    Args:
        x: Rows `[tokens, hidden]`.
        scale: Scale of all rows, fp32, one number; None for one for each row, by which its largest
            magnitude becomes 448.

    Returns:
        Numbers times the reciprocal of their scale, cut off at 448, and the scales, fp32
        `[tokens]` or `scale`.
    """
    wide = x.float()
    if scale is None:
        largest = wide.abs().amax(-1)
        # Not the maximum: that of a row with NaN would be NaN.
        scales = torch.fmax(largest / LARGEST_E4M3, largest.new_tensor(_SMALLEST_SCALE))
        factor = scales.reciprocal()[:, None]
    else:
        scales, factor = scale, scale.reciprocal()
    cut = (wide * factor).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return cut.to(torch.float8_e4m3fn), scales
