"""Rotary positions."""

# Shape suffixes: T tokens, H heads, K head dim, R = K / 2 rotation pairs.

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Rotation", "rotate", "rotation"]

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each `[T, 1, R]`."""


def rotation(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of the angles by which heads at `positions_T` are turned.

    Pair r of a head turns by `position * theta ** (-2 r / K)`. Angles are computed in fp32, or in
    fp64 where the model is.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pairs_R = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=wide) / head_dim
    angles_T1R = (positions_T.to(wide).unsqueeze(-1) * theta**-pairs_R).unsqueeze(1)
    return angles_T1R.cos(), angles_T1R.sin()


def rotate(x_THK: Tensor, turn: Rotation) -> Tensor:
    """Heads turned by their positions; the pairs are element r and element r + K / 2."""
    cos_T1R, sin_T1R = (part.to(x_THK.dtype) for part in turn)
    a_THR, b_THR = x_THK.chunk(2, -1)
    return torch.cat([a_THR * cos_T1R - b_THR * sin_T1R, b_THR * cos_T1R + a_THR * sin_T1R], -1)
