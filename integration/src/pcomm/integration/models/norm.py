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
        is_zero_centred: True to keep the weight as what is added to 1, which is done in fp32.
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
        is_zero_centred: bool = False,
        has_partial_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.is_zero_centred = eps, is_zero_centred
        first = 0.0 if is_zero_centred else 1.0
        self.weight = nn.Parameter(torch.full((width,), first, device=device, dtype=dtype))
        self.param_layouts = {"weight": ParamLayout(has_partial_gradient=has_partial_gradient)}

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        if self.is_zero_centred:
            wide = torch.promote_types(x.dtype, torch.float32)
            weight = 1.0 + self.weight.to(wide)
            return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
        weight = self.weight
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def first_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Values of the weight before training: a scale of 1; see `initialisation`."""
        return torch.zeros(shape) if self.is_zero_centred else torch.ones(shape)
