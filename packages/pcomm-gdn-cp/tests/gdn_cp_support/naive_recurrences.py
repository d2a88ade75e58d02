"""The recurrences token by token: their definitions, and the oracles of the chunked cores."""

# T tokens, N sequences, G key heads or groups, H value heads, K key dim, V value dim, P head dim,
# S state dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.entry import check_shape, compute_dtype
from pcomm.gdn_cp.ops.gated_delta_rule import check_delta_inputs, gated_delta_step
from pcomm.gdn_cp.ops.mamba2_ssd import check_ssd_inputs, mamba2_ssd_step
from pcomm.gdn_cp.pack_offsets import PackOffsets

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
    """What `chunk_gated_delta_rule` computes, one token after the other.

    Choose it as a reference, or to start decoding after few tokens: each token waits for the one
    before it. Arguments, results and errors are those of `chunk_gated_delta_rule`; differentiable
    as often as wanted.
    """
    asked, offsets = "naive_recurrent_gated_delta_rule", PackOffsets.of(cu_seqlens)
    check_delta_inputs(asked, offsets, k_TGK, v_THV, g_TH, beta_TH)
    check_shape(f"{asked}: q", q_TGK, tuple(k_TGK.shape))
    tokens = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
    key_dim = k_TGK.shape[2]
    return token_by_token(asked, gated_delta_step, tokens, offsets, v_THV, key_dim, initial_state)


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


def token_by_token(
    asked: str,
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor],
    offsets: PackOffsets,
    like_THV: Tensor,
    key_dim: int,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens, `[T, H, V]`, and the state after each sequence, `[N, H, K, V]`.

    Args:
        asked: Name of the call, for the error.
        step: Maps a state, `[1, H, K, V]`, and a row of each of `tokens` to an output and a state.
        tokens: `[T, ...]` each.
        offsets: Offsets of the sequences.
        like_THV: `[T, H, V]`, which gives heads, value dim, dtype and device.
        key_dim: Number of rows of the state of a head.
        initial_state: `[N, H, K, V]`; zeros if None.

    Raises:
        ConfigError: A state of another shape.
    """
    shape = (len(offsets) - 1, like_THV.shape[1], key_dim, like_THV.shape[2])
    if initial_state is None:
        initial_state = like_THV.new_zeros(shape, dtype=compute_dtype(like_THV))
    check_shape(f"{asked}: initial_state", initial_state, shape)
    initial_state = initial_state.to(compute_dtype(like_THV))
    outputs, states = [like_THV[:0]], [initial_state[:0]]
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        state = initial_state[sequence : sequence + 1]
        for token in range(start, stop):
            output, state = step(state, *(x[token : token + 1] for x in tokens))
            outputs.append(output)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)
