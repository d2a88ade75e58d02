"""What a piece of a sequence does to a state of Mamba-2: S -> M S + B, with one number M a head."""

# T tokens, N sequences, G groups, H heads, P head dim, S state dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.gdn_cp.ops.mamba2_ssd.chunk import StateSpaceChunks

__all__ = ["apply_decay_summary", "compose_decays", "state_space_summary"]

Summary = tuple[Tensor, Tensor]


def state_space_summary(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_log_H: Tensor,
    b_TGS: Tensor,
    *,
    dt_bias_H: Tensor,
    cu_seqlens: Sequence[int],
    chunk: int | None = None,
) -> Summary:
    """The map of each sequence; `StateSpaceChunks.summary` shares work with the outputs.

    Args:
        x_THP: As for `chunk_state_space`, like all that follow.
        dt_TH: `[T, H]`.
        a_log_H: `[H]`.
        b_TGS: `[T, G, S]`.
        dt_bias_H: `[H]`.
        cu_seqlens: Offsets of the sequences, on the host.
        chunk: Tokens of a chunk, `default_chunk` by default.

    Returns:
        M, `[N, H, 1, 1]`, and B, `[N, H, S, P]`, in fp32, or in fp64 if the inputs are. An empty
        sequence has one and zero. Differentiable once.

    Raises:
        LayoutError: As there.
        ConfigError: As there.
    """
    chunks = StateSpaceChunks.of(
        x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H=dt_bias_H, cu_seqlens=cu_seqlens, chunk=chunk
    )
    return chunks.summary()


def compose_decays(first: Summary, second: Summary) -> Summary:
    """The map of two pieces in a row.

    Args:
        first: M, `[..., 1, 1]`, and B, `[..., S, P]`, of the earlier piece.
        second: Those of the later one.
    """
    return second[0] * first[0], second[0] * first[1] + second[1]


def apply_decay_summary(summary: Summary, state: Tensor) -> Tensor:
    """The state that leaves a piece when `state`, `[..., S, P]`, enters it."""
    return summary[0] * state + summary[1]
