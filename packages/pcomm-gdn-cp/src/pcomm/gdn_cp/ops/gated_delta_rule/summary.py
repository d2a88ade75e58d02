"""What a segment of a sequence does to any state that enters it: the affine map S -> M S + B.

Ranks that hold segments of one sequence exchange these maps instead of tokens: applying those of
the earlier segments gives the state in which a segment starts.
"""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.gdn_cp.ops.gated_delta_rule.chunk import DeltaChunks
from pcomm.gdn_cp.ops.transitions import Summary

__all__ = ["gated_delta_summary"]


def gated_delta_summary(
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
    chunk: int | None = None,
) -> Summary:
    """The map of each sequence of the pack; `DeltaChunks.summary` shares work with the outputs.

    Args:
        k_TGK: `[T, G, K]` keys, normalised.
        v_THV: `[T, H, V]` values.
        g_TH: `[T, H]` logarithm of the decay of each token, at most 0.
        beta_TH: `[T, H]` from 0 to 1.
        cu_seqlens: Offsets of the sequences, on the host.
        chunk: Tokens of a chunk, `default_chunk` by default.

    Returns:
        M, `[N, H, K, K]`, and B, `[N, H, K, V]`, in fp32, or in fp64 if the values are. An empty
        sequence has the identity and zero. Differentiable once.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit, or a chunk without tokens.
    """
    chunks = DeltaChunks.of(k_TGK, v_THV, g_TH, beta_TH, cu_seqlens=cu_seqlens, chunk=chunk)
    return chunks.summary()
