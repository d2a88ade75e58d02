"""The gated delta rule token by token: the definition, and the reference of the chunks."""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import check_delta_inputs
from pcomm.gdn_cp.ops.gated_delta_rule.recurrent import gated_delta_step
from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.precision import compute_dtype

__all__ = ["naive_recurrent_gated_delta_rule"]


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
    layout = ChunkLayout.of(cu_seqlens, 1)
    asked = "naive_recurrent_gated_delta_rule"
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
