"""The recurrences token by token: their definitions, and the oracles of the chunked cores."""

# T tokens, N sequences, G key heads or groups, H value heads, K key dim, V value dim, P head dim,
# S state dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.entry import compute_dtype
from pcomm.gdn_cp.ops.gated_delta_rule import gated_delta_step
from pcomm.gdn_cp.ops.mamba2_ssd import mamba2_ssd_step

__all__ = ["naive_recurrent_gated_delta_rule", "naive_recurrent_mamba2_ssd"]


def naive_recurrent_gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `chunk_gated_delta_rule` computes, one token after the other."""
    tokens = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
    shape = v_THV, k_TGK.shape[2]
    return token_by_token(gated_delta_step, tokens, cu_seqlens, *shape, initial_state)


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
    """What `chunk_mamba2_ssd` computes, one token after the other."""

    def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return mamba2_ssd_step(state, x, dt, a_log_H, b, c, d_H=d_H, dt_bias_H=dt_bias_H)

    tokens = (x_THP, dt_TH, b_TGS, c_TGS)
    return token_by_token(step, tokens, cu_seqlens, x_THP, b_TGS.shape[2], initial_state)


def token_by_token(
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor],
    cu_seqlens: Sequence[int],
    like_THV: Tensor,
    key_dim: int,
    state_NHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens, `[T, H, V]`, and the state after each sequence, `[N, H, K, V]`."""
    dtype = compute_dtype(like_THV)
    if state_NHKV is None:
        shape = (len(cu_seqlens) - 1, like_THV.shape[1], key_dim, like_THV.shape[2])
        state_NHKV = like_THV.new_zeros(shape, dtype=dtype)
    outputs, states = [like_THV[:0]], [state_NHKV[:0].to(dtype)]
    for sequence, (start, stop) in enumerate(pairwise(cu_seqlens)):
        state = state_NHKV[sequence : sequence + 1].to(dtype)
        for token in range(start, stop):
            output, state = step(state, *(x[token : token + 1] for x in tokens))
            outputs.append(output)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)
