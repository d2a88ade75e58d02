"""The gated delta rule over packed sequences, in chunks: the core of a Gated DeltaNet layer.

For each value head, with its key head's query q and key k, S is `[K, V]` and
  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q.
`gated_delta_recurrent` computes this as it stands; here chunks of tokens become matrix products.
"""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import DeltaChunks
from pcomm.gdn_cp.ops.norms import l2_normalise
from pcomm.gdn_cp.ops.precision import compute_dtype

__all__ = ["chunk_gated_delta_rule", "delta_gates", "gated_delta_rule", "normalise_queries_keys"]


@outside_graphs
def chunk_gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule on each sequence of the pack, in chunks.

    Choose it for training and prefill; `gated_delta_step` is for decoding. Queries and keys are
    used as they are: `gated_delta_rule` prepares them. Computes in fp32, and in fp64 if the
    values are fp64, also under autocast. Differentiable once.

    Args:
        q_TGK: `[T, G, K]` queries, normalised and scaled.
        k_TGK: `[T, G, K]` keys, normalised.
        v_THV: `[T, H, V]` values; `H` is a multiple of `G`, and value head h belongs to key head
            h // (H / G).
        g_TH: `[T, H]` logarithm of the decay of each token, at most 0.
        beta_TH: `[T, H]` from 0 to 1.
        cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
        initial_state: `[N, H, K, V]`, the state before each sequence; zeros by default.
        chunk: Tokens of a chunk, `default_chunk` by default. Results differ by rounding.

    Returns:
        `[T, H, V]` in the dtype of `v_THV`, and the state after each sequence, `[N, H, K, V]`, in
        the dtype of the computation. An empty sequence hands its state on.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit, or a chunk without tokens.

    Source:
        Gated Delta Networks, arXiv 2412.06464; grouped heads as in Qwen3-Next.
    """
    chunks = DeltaChunks.of(k_TGK, v_THV, g_TH, beta_TH, cu_seqlens=cu_seqlens, chunk=chunk)
    return chunks.outputs(q_TGK, initial_state=initial_state)


def gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_gated_delta_rule` with queries and keys as Qwen3-Next prepares them.

    Args:
        q_TGK: `[T, G, K]` queries, as they come from the convolution.
        k_TGK: `[T, G, K]` keys, likewise.
        v_THV: As there, like all that follow.
        g_TH: From `delta_gates`.
        beta_TH: From `delta_gates`.
        cu_seqlens: Offsets of the sequences, on the host.
        initial_state: `[N, H, K, V]`; zeros by default.
        chunk: Tokens of a chunk, `default_chunk` by default.

    Returns:
        What `chunk_gated_delta_rule` returns.

    Raises:
        LayoutError: As there.
        ConfigError: As there.
    """
    q, k = normalise_queries_keys(q_TGK, k_TGK)
    return chunk_gated_delta_rule(
        q, k, v_THV, g_TH, beta_TH, cu_seqlens=cu_seqlens, initial_state=initial_state, chunk=chunk
    )


def normalise_queries_keys(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of length K^-1/2 and keys of length 1 in every head, in fp32 or fp64."""
    return l2_normalise(q_TGK, scale=q_TGK.shape[-1] ** -0.5), l2_normalise(k_TGK)


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
