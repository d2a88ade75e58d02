"""The state space of Mamba-2 token by token: the definition, and the reference of the chunks."""

# T tokens, N sequences, G groups, H heads, P head dim, S state dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout
from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import check_ssd_inputs
from pcomm.gdn_cp.ops.mamba2_ssd.recurrent import mamba2_ssd_step
from pcomm.gdn_cp.ops.precision import compute_dtype

__all__ = ["naive_recurrent_mamba2_ssd"]


def naive_recurrent_mamba2_ssd(
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
    """What `chunk_mamba2_ssd` computes, one token after the other.

    Choose it as a reference, or to start decoding after few tokens: each token waits for the one
    before it. Arguments, results and errors are those of `chunk_mamba2_ssd`; differentiable as
    often as wanted.
    """
    layout = ChunkLayout.of(cu_seqlens, 1)
    asked = "naive_recurrent_mamba2_ssd"
    check_ssd_inputs(asked, layout.cu_seqlens, x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H)
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
            y, state = mamba2_ssd_step(state, *inputs, d_H=d_H, dt_bias_H=dt_bias_H)
            outputs.append(y)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)
