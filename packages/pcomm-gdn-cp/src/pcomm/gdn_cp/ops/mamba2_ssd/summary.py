"""What a segment of a sequence does to a state of Mamba-2: S -> M S + B, one number M a head."""

# T tokens, N sequences, G groups, H heads, P head dim, S state dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.gdn_cp.ops.mamba2_ssd.chunk import SsdChunks
from pcomm.gdn_cp.ops.transitions import Summary

__all__ = ["mamba2_ssd_summary"]


def mamba2_ssd_summary(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_log_H: Tensor,
    b_TGS: Tensor,
    *,
    dt_bias_H: Tensor,
    cu_seqlens: Sequence[int],
    chunk: int | None = None,
) -> Summary:
    """The map of each sequence; `SsdChunks.summary` shares work with the outputs.

    Args:
        x_THP: `[T, H, P]` inputs.
        dt_TH: `[T, H]` time steps as projected.
        a_log_H: `[H]` parameter, `A_log`.
        b_TGS: `[T, G, S]` input matrix of each token.
        dt_bias_H: `[H]` parameter.
        cu_seqlens: Offsets of the sequences, on the host.
        chunk: Tokens of a chunk, `default_chunk` by default.

    Returns:
        M, `[N, H, 1, 1]`, and B, `[N, H, S, P]`, in fp32, or in fp64 if the inputs are. An empty
        sequence has one and zero. Differentiable once.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit, or a chunk without tokens.
    """
    chunks = SsdChunks.of(
        x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H=dt_bias_H, cu_seqlens=cu_seqlens, chunk=chunk
    )
    return chunks.summary()
