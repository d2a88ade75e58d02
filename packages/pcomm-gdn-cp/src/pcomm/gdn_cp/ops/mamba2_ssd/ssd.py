"""The state space of Mamba-2 over packed sequences, in chunks.

For each head, with its group's b and c, the state S is `[S, P]` and
  S <- e^{A dt} S + dt b x^T;  y = S^T c + d x,  where A = -e^{a_log}, dt = softplus(dt + bias).
That is a gated delta rule without the correction; both read their states alike (`decayed_read`).
"""

# T tokens, N sequences, G groups, H heads, P head dim, S state dim

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import StateSpaceChunks

__all__ = ["chunk_state_space"]


@outside_graphs
def chunk_state_space(
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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The state space of each sequence of the pack, in chunks.

    Choose it for training and prefill; `state_space_step` is for decoding. Computes in fp32, and
    in fp64 if the inputs are fp64, also under autocast. Differentiable once.

    Args:
        x_THP: `[T, H, P]` inputs; `H` is a multiple of `G`.
        dt_TH: `[T, H]` time steps as projected: the bias and the softplus are applied here.
        a_log_H: `[H]` parameter, `A_log`.
        b_TGS: `[T, G, S]` input matrix of each token; head h belongs to group h // (H / G).
        c_TGS: `[T, G, S]` output matrix of each token.
        d_H: `[H]` weight of the input that skips the state, or nothing.
        dt_bias_H: `[H]` parameter.
        cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
        initial_state: `[N, H, S, P]`, the state before each sequence; zeros by default.
            `transformers` keeps its transpose, `[N, H, P, S]`.
        chunk: Tokens of a chunk, `default_chunk` by default. Results differ by rounding.

    Returns:
        `[T, H, P]` in the dtype of `x_THP`, and the state after each sequence, `[N, H, S, P]`, in
        the dtype of the computation. An empty sequence hands its state on.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit, or a chunk without tokens.

    Source:
        State space duality, arXiv 2405.21060; names as in `mamba2_chunk_scan`, `transformers`.
    """
    chunks = StateSpaceChunks.of(
        x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H=dt_bias_H, cu_seqlens=cu_seqlens, chunk=chunk
    )
    return chunks.outputs(c_TGS, d_H=d_H, initial_state=initial_state)
