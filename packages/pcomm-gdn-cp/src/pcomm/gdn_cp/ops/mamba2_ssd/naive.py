"""The state space of Mamba-2 token by token: the definition, and the reference of the chunks."""

# T tokens, N sequences, G groups, H heads, P head dim, S state dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import check_ssd_inputs
from pcomm.gdn_cp.ops.mamba2_ssd.recurrent import mamba2_ssd_step
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets
from pcomm.gdn_cp.ops.token_loop import token_by_token

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
    asked, offsets = "naive_recurrent_mamba2_ssd", PackOffsets.of(cu_seqlens)
    check_ssd_inputs(asked, offsets, x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H)
    check_shape(f"{asked}: c", c_TGS, tuple(b_TGS.shape))

    def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return mamba2_ssd_step(state, x, dt, a_log_H, b, c, d_H=d_H, dt_bias_H=dt_bias_H)

    tokens = (x_THP, dt_TH, b_TGS, c_TGS)
    return token_by_token(asked, step, tokens, offsets, x_THP, b_TGS.shape[2], initial_state)
