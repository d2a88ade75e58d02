"""Norms of the mixers: over a head's length, and RMS norms that are gated before or after.

Qwen3-Next normalises each head and then gates; Mamba-2 gates and then normalises groups of heads.
All compute in fp32, and in fp64 for fp64 inputs.
"""

# D normalised dimension, F features of all groups, T tokens, G key heads, K key dim

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.errors import ConfigError
from pcomm.gdn_cp.ops.entry import compute_dtype

__all__ = [
    "check_groups",
    "gate_then_rms_norm",
    "l2_normalise",
    "normalise_queries_keys",
    "rms_norm_then_gate",
]


def l2_normalise(x: Tensor, *, scale: float = 1.0, eps: float = 1e-6) -> Tensor:
    """`scale x / sqrt(|x|^2 + eps)` over the last dimension, in fp32, or fp64 for fp64.

    Source:
        Queries and keys of Qwen3-Next, `transformers` 5.23.
    """
    x = x.to(compute_dtype(x))
    return x * ((x * x).sum(-1, keepdim=True) + eps).rsqrt().mul(scale)


def normalise_queries_keys(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of length K^-1/2 and keys of length 1 in every head, in fp32 or fp64."""
    return l2_normalise(q_TGK, scale=q_TGK.shape[-1] ** -0.5), l2_normalise(k_TGK)


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight_D: Tensor, *, eps: float = 1e-6) -> Tensor:
    """`weight x / rms(x) silu(gate)`, over the last dimension: a head of Gated DeltaNet.

    Args:
        x: `[..., D]`.
        gate: `[..., D]`.
        weight_D: `[D]`.
        eps: Added to the mean square.

    Returns:
        `[..., D]`, dtype of `x`.

    Source:
        `Qwen3NextRMSNormGated`, `transformers` 5.23.
    """
    dtype = compute_dtype(x)
    normed = _normed(x.to(dtype), eps)
    # As there, the norm's result is rounded before the gate, and the product once more.
    return (weight_D * normed.to(x.dtype) * F.silu(gate.to(dtype))).to(x.dtype)


def gate_then_rms_norm(
    x: Tensor, gate: Tensor, weight_F: Tensor, *, num_groups: int = 1, eps: float = 1e-6
) -> Tensor:
    """`weight y / rms(y)` of `y = x silu(gate)`, with a mean square for each group: Mamba-2.

    Args:
        x: `[..., F]`.
        gate: `[..., F]`.
        weight_F: `[F]`.
        num_groups: Groups of consecutive features, each normalised by itself.
        eps: Added to the mean square.

    Returns:
        `[..., F]`, dtype of `x`.

    Raises:
        ConfigError: The features are no multiple of the groups.

    Source:
        `MambaRMSNormGated`, `transformers` 5.23.
    """
    check_groups(x, num_groups)
    dtype = compute_dtype(x)
    gated = x.to(dtype) * F.silu(gate.to(dtype))
    normed = _normed(gated.unflatten(-1, (num_groups, -1)), eps).flatten(-2)
    return (weight_F * normed.to(x.dtype)).to(x.dtype)


def check_groups(x: Tensor, num_groups: int) -> None:
    """The features fall into so many groups.

    Raises:
        ConfigError: They do not.
    """
    if x.shape[-1] % num_groups:
        raise ConfigError(
            f"gate_then_rms_norm: num_groups={num_groups}",
            found=f"{x.shape[-1]} features",
            why="All groups have the same number of consecutive features.",
            fix="Use a number of groups that divides the features.",
        )


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
