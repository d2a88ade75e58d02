"""Sums of squares that are right however many elements a tensor has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sum_of_squares"]

# On a CPU torch adds the squares of a tensor one after the other in fp32, in as many sums as a
# register has lanes. Of 2**20 random elements the norm is 1e-5 too small, of 2**27 one percent;
# of these few it is off by rounding.
_PIECE = 2**16


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add up the squares of all elements of all tensors, in fp64. Local; no wait for the device.

    Args:
        tensors: Floating-point tensors. Each chunk is squared in the type that torch computes its
            norm in; the sum over chunks and tensors is in fp64.
        device: Device of the tensors and of the result, also if there are no tensors.
    """
    # Kernels for GPUs add up in a tree, and a view more is a kernel more.
    is_flat = device.type == "cpu"
    pieces = [piece for one in tensors for piece in (_pieces(one) if is_flat else [one])]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.flatten().split(_PIECE) if tensor.numel() > _PIECE else [tensor]
