"""One token of the state space of Mamba-2: a step of decoding."""

# N sequences, G groups, H heads, P head dim, S state dim

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.mamba2_ssd.chunk import time_steps
from pcomm.gdn_cp.ops.precision import full_precision

__all__ = ["mamba2_ssd_step"]


def mamba2_ssd_step(
    state_NHSP: Tensor,
    x_NHP: Tensor,
    dt_NH: Tensor,
    a_log_H: Tensor,
    b_NGS: Tensor,
    c_NGS: Tensor,
    *,
    d_H: Tensor | None = None,
    dt_bias_H: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: what comes out, and the new states.

    Args:
        state_NHSP: `[N, H, S, P]`, fp32 or fp64; not changed.
        x_NHP: `[N, H, P]` inputs; `H` is a multiple of `G`.
        dt_NH: `[N, H]` time steps as projected.
        a_log_H: `[H]` parameter, `A_log`.
        b_NGS: `[N, G, S]` input matrices.
        c_NGS: `[N, G, S]` output matrices.
        d_H: `[H]` weight of the input that skips the state, or nothing.
        dt_bias_H: `[H]` parameter.

    Returns:
        `[N, H, P]` in the dtype of `x_NHP`, and `[N, H, S, P]`.
    """
    dtype, num_groups = state_NHSP.dtype, b_NGS.shape[1]
    # The last bits of a softplus depend on the place in the batch; those of fp64 vanish here.
    x, time = x_NHP.to(dtype), time_steps(dt_NH, dt_bias_H, torch.float64).to(dtype)
    decay_NH = (-a_log_H.to(dtype).exp() * time).exp()
    b, c = (x.to(dtype)[:, :, None] for x in (b_NGS, c_NGS))
    with full_precision(state_NHSP):
        written = (
            b.unsqueeze(-1) * (x * time.unsqueeze(-1)).unflatten(1, (num_groups, -1))[..., None, :]
        )
        state = state_NHSP * decay_NH[..., None, None] + written.flatten(1, 2)
        y = c.unsqueeze(-2) @ state.unflatten(1, (num_groups, -1))
    y_NHP = y.squeeze(-2).flatten(1, 2)
    if d_H is not None:
        y_NHP = y_NHP + d_H.to(dtype)[:, None] * x
    return y_NHP.to(x_NHP.dtype), state
