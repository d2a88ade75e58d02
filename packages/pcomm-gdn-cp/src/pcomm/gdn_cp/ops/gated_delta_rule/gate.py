"""The gates of a Gated DeltaNet layer, from its projections."""

# T tokens, H value heads

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.ops.precision import compute_dtype

__all__ = ["delta_gates"]


def delta_gates(
    a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """The logarithm of each token's decay, and how much of its error it corrects.

    Args:
        a_TH: `[T, H]` projection, for the decay.
        b_TH: `[T, H]` projection, for beta.
        a_log_H: `[H]` parameter, `A_log`.
        dt_bias_H: `[H]` parameter.

    Returns:
        `-exp(a_log) softplus(a + dt_bias)` and `sigmoid(b)`, `[T, H]`, both in fp32 or fp64.
    """
    dtype = compute_dtype(a_TH)
    time_TH = F.softplus(a_TH.to(dtype) + dt_bias_H.to(dtype))
    return -a_log_H.to(dtype).exp() * time_TH, b_TH.to(dtype).sigmoid()
