"""The state space of Mamba-2 token by token: the definition, the reference, and a decoding step."""

# T tokens, N sequences, G groups, H heads, P head dim, S state dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout
from pcomm.gdn_cp.ops.inputs import check_shape
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import check_state_space_inputs, time_steps
from pcomm.gdn_cp.ops.precision import compute_dtype, full_precision

__all__ = ["recurrent_state_space", "state_space_step"]


def state_space_step(
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
    x, time = x_NHP.to(dtype), time_steps(dt_NH, dt_bias_H, dtype)
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


def recurrent_state_space(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_log_H: Tensor,
    b_TGS: Tensor,
    c_TGS: Tensor,
    *,
    d_H: Tensor | None = None,
    dt_bias_H: Tensor,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `chunk_state_space` computes, one token after the other.

    Choose it as a reference, or to start decoding after few tokens: each token waits for the one
    before it. Arguments, results and errors are those of `chunk_state_space`; differentiable as
    often as wanted.
    """
    layout = ChunkLayout.of(cu_seqlens, 1)
    asked = "recurrent_state_space"
    check_state_space_inputs(asked, layout.cu_seqlens, x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H)
    check_shape(f"{asked}: c", c_TGS, tuple(b_TGS.shape))
    shape = (layout.num_sequences, x_THP.shape[1], b_TGS.shape[2], x_THP.shape[2])
    if initial_state is None:
        initial_state = x_THP.new_zeros(shape, dtype=compute_dtype(x_THP))
    check_shape(f"{asked}: initial_state", initial_state, shape)
    initial_state = initial_state.to(compute_dtype(x_THP))
    outputs, states = [x_THP[:0]], [initial_state[:0]]
    for sequence, length in enumerate(layout.lengths):
        start, state = layout.cu_seqlens[sequence], initial_state[sequence : sequence + 1]
        for token in range(start, start + length):
            one = slice(token, token + 1)
            inputs = (x_THP[one], dt_TH[one], a_log_H, b_TGS[one], c_TGS[one])
            y, state = state_space_step(state, *inputs, d_H=d_H, dt_bias_H=dt_bias_H)
            outputs.append(y)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)
