"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.tensor_parallel import ParamLayout

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension; local on every rank.

    Args:
        width: Length of the last dimension.
        eps: Added to the mean square.
        has_partial_gradient: True if this rank normalises only some of the tokens or heads that
            share the weight, so that its gradient has to be summed over the ranks.
        device: Device of the weight.
        dtype: Dtype of the weight.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        has_partial_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.param_layouts = {"weight": ParamLayout(has_partial_gradient=has_partial_gradient)}

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
