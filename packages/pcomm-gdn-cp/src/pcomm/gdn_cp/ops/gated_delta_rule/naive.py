"""The gated delta rule token by token: the definition, and the reference of the chunks."""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.gdn_cp.ops.gated_delta_rule.chunk import check_delta_inputs
from pcomm.gdn_cp.ops.gated_delta_rule.recurrent import gated_delta_step
from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets
from pcomm.gdn_cp.ops.token_loop import token_by_token

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
    asked, offsets = "naive_recurrent_gated_delta_rule", PackOffsets.of(cu_seqlens)
    check_delta_inputs(asked, offsets, k_TGK, v_THV, g_TH, beta_TH)
    check_shape(f"{asked}: q", q_TGK, tuple(k_TGK.shape))
    tokens = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
    key_dim = k_TGK.shape[2]
    return token_by_token(asked, gated_delta_step, tokens, offsets, v_THV, key_dim, initial_state)
