"""Rotary positions, also of a part of a head, and stretched for longer contexts."""

# Shape suffixes: T tokens, H heads, K head dim, R rotation pairs.

from __future__ import annotations

import math

import torch
from torch import Tensor

from pcomm.integration.config_resolved import ResolvedModel

__all__ = ["Rotation", "frequencies", "rotate", "rotation"]

Rotation = tuple[Tensor, Tensor]
"""Cosines `[T, 1, 1, R]`, and sines `[T, 1, 2, R]` with the sign of each half of a head."""


def frequencies(
    config: ResolvedModel, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """`[R]`, by what angle a position turns each pair of a head.

    Pair r of R turns by `theta ** (-r / R)`, slowed as `rope_scaling` says. In fp32, or in fp64 for
    a model in fp64.

    Args:
        config: Shape of the model.
        dtype: Dtype of the model.
        device: Device of the result.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021; `llama3`
        as in Llama 3.1, `transformers` 5.23.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    turned = int(config.head_dim * config.rotary_fraction)
    pairs_R = torch.arange(0, turned, 2, device=device, dtype=wide) / turned
    angles_R = config.rope_theta**-pairs_R
    if config.rope_scaling == "none":
        return angles_R
    slowed_R = angles_R / config.rope_factor
    if config.rope_scaling == "linear":
        return slowed_R
    low, high = config.rope_low_frequency, config.rope_high_frequency
    turns_R = config.rope_original_context * angles_R / (2 * math.pi)
    kept_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return slowed_R + kept_R * (angles_R - slowed_R)


def rotation(positions_T: Tensor, frequencies_R: Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines by which heads at `positions_T` are turned; local.

    Args:
        positions_T: Integers, the position of each token in its sequence.
        frequencies_R: Frequencies of the pairs, from `frequencies`.
        dtype: Dtype of the result, that of the heads; angles are computed in that of the
            frequencies.
    """
    angles_T11R = positions_T.view(-1, 1, 1, 1) * frequencies_R
    sines_T11R = angles_T11R.sin().to(dtype)
    return angles_T11R.cos().to(dtype), torch.cat([-sines_T11R, sines_T11R], -2)


def rotate(x_THK: Tensor, turn: Rotation) -> Tensor:
    """Heads turned by their positions; the pairs are element r and element r + R.

    What is behind the first 2 R elements of a head stays as it is.
    """
    cos_T11R, sin_T12R = turn
    if cos_T11R.dtype != x_THK.dtype:
        # Under autocast.
        cos_T11R, sin_T12R = cos_T11R.to(x_THK.dtype), sin_T12R.to(x_THK.dtype)
    turned = 2 * cos_T11R.shape[-1]
    if turned < x_THK.shape[-1]:
        head, rest = x_THK.split([turned, x_THK.shape[-1] - turned], -1)
        return torch.cat([rotate(head, turn), rest], -1)
    # Named, since a rank without tokens has no elements to divide by.
    x_TH2R = x_THK.view(*x_THK.shape[:-1], 2, turned // 2)
    return torch.addcmul(x_TH2R * cos_T11R, x_TH2R.flip(-2), sin_T12R).view_as(x_THK)
