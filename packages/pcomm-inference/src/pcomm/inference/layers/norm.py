"""The norm of rows as the kernels of a step are told of it, and as torch computes it.

It stands apart since layers and attention both norm rows, and neither should import the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.errors import ConfigError

__all__ = ["Norm"]


@dataclass(frozen=True)
class Norm:
    """`x / rms(x) * weight` over the last dimension.

    Args:
        weight: `[D]`, contiguous.
        eps: Number that is added to the mean square.
        is_zero_centred: True where the weight is what is added to 1, which is done in fp32.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    weight: Tensor
    eps: float
    is_zero_centred: bool = False

    def __post_init__(self) -> None:
        """Refuse what kernels would take for other numbers.

        Raises:
            ConfigError: The weight is not contiguous.
        """
        if not self.weight.is_contiguous():
            raise ConfigError(
                "Norm: weight",
                found=f"strides {self.weight.stride()}",
                why="Kernels read its numbers as they lie side by side.",
                fix="Give weight.contiguous(), made once.",
            )

    def of(self, x: Tensor) -> Tensor:
        """The normed rows, of the dtype of `x`. Local.

        Args:
            x: `[..., D]`.
        """
        weight = self.weight
        if self.is_zero_centred:
            wide = torch.promote_types(x.dtype, torch.float32)
            weight = 1.0 + weight.to(wide)
            return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)
