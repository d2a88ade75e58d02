"""The gated delta rule token by token: the definition, the reference, and a step of decoding."""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import check_delta_inputs
from pcomm.gdn_cp.ops.inputs import check_shape
from pcomm.gdn_cp.ops.precision import compute_dtype, full_precision

__all__ = ["gated_delta_step", "recurrent_gated_delta_rule"]


def gated_delta_step(
    state_NHKV: Tensor,
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    g_NH: Tensor,
    beta_NH: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: what it reads, and the new states.

    Args:
        state_NHKV: `[N, H, K, V]`, fp32 or fp64; not changed.
        q_NGK: `[N, G, K]` queries, normalised and scaled.
        k_NGK: `[N, G, K]` keys, normalised.
        v_NHV: `[N, H, V]` values; `H` is a multiple of `G`.
        g_NH: `[N, H]` logarithm of the decay.
        beta_NH: `[N, H]`.

    Returns:
        `[N, H, V]` in the dtype of `v_NHV`, and `[N, H, K, V]`.
    """
    num_groups = k_NGK.shape[1]
    dtype = state_NHKV.dtype
    q, k = (x.to(dtype)[:, :, None, None] for x in (q_NGK, k_NGK))
    v, g, beta = (x.to(dtype).unflatten(1, (num_groups, -1)) for x in (v_NHV, g_NH, beta_NH))
    with full_precision(state_NHKV):
        state = state_NHKV.unflatten(1, (num_groups, -1)) * g.exp()[..., None, None]
        error = v.unsqueeze(-2) - k @ state
        state = state + k.mT * (beta[..., None, None] * error)
        read = (q @ state).squeeze(-2)
    return read.flatten(1, 2).to(v_NHV.dtype), state.flatten(1, 2)


def recurrent_gated_delta_rule(
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
    layout = ChunkLayout.of(cu_seqlens, 1)
    asked = "recurrent_gated_delta_rule"
    check_delta_inputs(asked, layout.cu_seqlens, k_TGK, v_THV, g_TH, beta_TH)
    check_shape(f"{asked}: q", q_TGK, tuple(k_TGK.shape))
    shape = (layout.num_sequences, v_THV.shape[1], k_TGK.shape[2], v_THV.shape[2])
    if initial_state is None:
        initial_state = v_THV.new_zeros(shape, dtype=compute_dtype(v_THV))
    check_shape(f"{asked}: initial_state", initial_state, shape)
    initial_state = initial_state.to(compute_dtype(v_THV))
    reads, states = [v_THV[:0]], [initial_state[:0]]
    for sequence, length in enumerate(layout.lengths):
        start, state = layout.cu_seqlens[sequence], initial_state[sequence : sequence + 1]
        for token in range(start, start + length):
            one = slice(token, token + 1)
            inputs = (q_TGK[one], k_TGK[one], v_THV[one], g_TH[one], beta_TH[one])
            read, state = gated_delta_step(state, *inputs)
            reads.append(read)
        states.append(state)
    return torch.cat(reads), torch.cat(states)
