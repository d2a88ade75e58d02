"""What a piece of a sequence does to any state that enters it: the affine map S -> M S + B.

Ranks that hold pieces of one sequence exchange these maps instead of tokens: composing those of
the pieces before gives the state in which a piece starts.
"""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.gdn_cp.ops.gated_delta_rule.chunk import DeltaChunks
from pcomm.gdn_cp.ops.precision import full_precision

__all__ = ["apply_summary", "compose", "gated_delta_summary"]

Summary = tuple[Tensor, Tensor]


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
        k_TGK: As for `chunk_gated_delta_rule`, like all that follow.
        v_THV: `[T, H, V]`.
        g_TH: `[T, H]`.
        beta_TH: `[T, H]`.
        cu_seqlens: Offsets of the sequences, on the host.
        chunk: Tokens of a chunk, `default_chunk` by default.

    Returns:
        M, `[N, H, K, K]`, and B, `[N, H, K, V]`, in fp32, or in fp64 if the values are. An empty
        sequence has the identity and zero. Differentiable once.

    Raises:
        LayoutError: As there.
        ConfigError: As there.
    """
    chunks = DeltaChunks.of(k_TGK, v_THV, g_TH, beta_TH, cu_seqlens=cu_seqlens, chunk=chunk)
    return chunks.summary()


def compose(first: Summary, second: Summary) -> Summary:
    """The map of two pieces in a row.

    Args:
        first: M, `[..., K, K]`, and B, `[..., K, V]`, of the earlier piece.
        second: Those of the later one.
    """
    transition, written = second
    with full_precision(written):
        return transition @ first[0], transition @ first[1] + written


def apply_summary(summary: Summary, state: Tensor) -> Tensor:
    """The state that leaves a piece when `state`, `[..., K, V]`, enters it."""
    transition, written = summary
    with full_precision(written):
        return transition @ state + written
