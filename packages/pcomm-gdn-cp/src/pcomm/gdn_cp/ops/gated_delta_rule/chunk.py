"""The gated delta rule over packed sequences, in chunks: the core of a Gated DeltaNet layer.

For each value head, with its key head's query q and key k, S is `[K, V]` and
  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q.
`naive_recurrent_gated_delta_rule` computes this as it stands; here chunks of tokens become matrix
products. What tokens write within a chunk does not depend on the state that enters it, up to one
product with the state. So a rank that first needs the summary of its tokens, and later, when the
state before them is known, their outputs, computes the chunks once.
"""

# T tokens, N sequences, M chunks, C tokens of a chunk, G key heads, H value heads,
# R value heads for each key head, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout, default_chunk, from_chunks, to_chunks
from pcomm.gdn_cp.ops.decayed_read import log_decay_since_start, pairwise_decay, read_chunks
from pcomm.gdn_cp.ops.gated_delta_rule.scan import DeltaScan, chunk_inverse, delta_scan
from pcomm.gdn_cp.ops.input_checks import check_group, check_shape, check_tokens
from pcomm.gdn_cp.ops.precision import compute_dtype
from pcomm.gdn_cp.ops.state_layout import state_for_scan, state_for_user

__all__ = ["DeltaChunks", "check_delta_inputs", "chunk_gated_delta_rule"]


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
    used as they are: `normalise_queries_keys` prepares them as in Qwen3-Next. Computes in fp32, and
    in fp64 if the values are fp64, also under autocast. Differentiable once.

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


@dataclass(frozen=True)
class DeltaChunks:
    """Keys, values and gates of a pack in chunks, with the inverse of each chunk's system.

    Make it with `DeltaChunks.of`; gradients flow to what it was made from.
    """

    layout: ChunkLayout
    dtype: torch.dtype
    k_MGCK: Tensor
    v_MGRCV: Tensor
    beta_MGRC: Tensor
    decay_MGRC: Tensor
    pairwise_MGRCC: Tensor
    inverse_MGRCC: Tensor

    @classmethod
    @outside_graphs
    def of(
        cls,
        k_TGK: Tensor,
        v_THV: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        *,
        cu_seqlens: Sequence[int],
        chunk: int | None = None,
    ) -> DeltaChunks:
        """Cut the pack into chunks and solve the system of each.

        Args:
            k_TGK: `[T, G, K]` keys, normalised.
            v_THV: `[T, H, V]` values; `H` is a multiple of `G`, and value head h belongs to key
                head h // (H / G).
            g_TH: `[T, H]` logarithm of the decay of each token, at most 0.
            beta_TH: `[T, H]` from 0 to 1.
            cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
            chunk: Tokens of a chunk; `default_chunk` says by default.

        Raises:
            LayoutError: The offsets fall, or do not end at `T`.
            ConfigError: Shapes that do not fit, or a chunk without tokens.
        """
        chunk = default_chunk(k_TGK.shape[-1]) if chunk is None else chunk
        layout = ChunkLayout.of(cu_seqlens, chunk)
        check_delta_inputs("DeltaChunks", layout.cu_seqlens, k_TGK, v_THV, g_TH, beta_TH)
        dtype, num_groups = compute_dtype(v_THV), k_TGK.shape[1]
        tensors = (k_TGK, v_THV, g_TH, beta_TH)
        k, v, g, beta = (to_chunks(x, layout).to(dtype) for x in tensors)
        v, beta = (x.unflatten(1, (num_groups, -1)) for x in (v, beta))
        decay = log_decay_since_start(g, num_groups)
        pairs = pairwise_decay(decay)
        inverse = chunk_inverse(k, beta, pairs)
        return cls(layout, v_THV.dtype, k, v, beta, decay, pairs, inverse)

    @outside_graphs
    def outputs(
        self, q_TGK: Tensor, *, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the queries read, and the states after the sequences.

        Args:
            q_TGK: `[T, G, K]` queries, normalised and scaled.
            initial_state: `[N, H, K, V]`, the state before each sequence; zeros by default.

        Returns:
            `[T, H, V]` in the dtype of the values, and `[N, H, K, V]` in fp32, or in fp64 if the
            values are.

        Raises:
            ConfigError: Queries or state of another shape.
        """
        num_groups, key_dim = self.k_MGCK.shape[1], self.k_MGCK.shape[-1]
        shape = (self.layout.num_tokens, num_groups, key_dim)
        check_shape("DeltaChunks.outputs: q", q_TGK, shape)
        initial = state_for_scan(
            "DeltaChunks.outputs", initial_state, self.layout, self.v_MGRCV, num_groups, key_dim
        )
        scan = self._scan(self.v_MGRCV, initial)
        read_MGRCV = read_chunks(
            to_chunks(q_TGK, self.layout).to(self.v_MGRCV.dtype),
            self.k_MGCK,
            scan.values_MGRCV,
            scan.states_MGKRV,
            self.decay_MGRC,
            self.pairwise_MGRCC,
        )
        output = from_chunks(read_MGRCV.flatten(1, 2), self.layout).to(self.dtype)
        return output, state_for_user(scan.final_NGKRV, self.layout)

    @outside_graphs
    def summary(self) -> tuple[Tensor, Tensor]:
        """What each sequence does to a state that enters it: S becomes M S + B.

        Returns:
            M, `[N, H, K, K]`, and B, `[N, H, K, V]`, in fp32, or in fp64 if the values are.
        """
        num_groups, key_dim = self.k_MGCK.shape[1], self.k_MGCK.shape[-1]
        num_repeats, num_sequences = self.v_MGRCV.shape[2], self.layout.num_sequences
        one = torch.eye(key_dim, dtype=self.v_MGRCV.dtype, device=self.v_MGRCV.device)
        # The columns of a state are independent. So the map is found by running it: the identity
        # enters in K more columns, in which nothing is written.
        start = F.pad(one, (0, self.v_MGRCV.shape[-1]))[:, None]
        start = start.expand(num_sequences, num_groups, key_dim, num_repeats, -1).contiguous()
        scan = self._scan(F.pad(self.v_MGRCV, (key_dim, 0)), start)
        both = state_for_user(scan.final_NGKRV, self.layout)
        return both[..., :key_dim], both[..., key_dim:]

    def _scan(self, v_MGRCV: Tensor, initial_NGKRV: Tensor) -> DeltaScan:
        return delta_scan(
            self.k_MGCK,
            v_MGRCV,
            self.beta_MGRC,
            self.decay_MGRC,
            initial_NGKRV,
            self.pairwise_MGRCC,
            self.inverse_MGRCC,
            self.layout.step_sizes,
        )


def check_delta_inputs(
    asked: str,
    cu_seqlens: Sequence[int],
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
) -> None:
    """Keys, values and gates are of one pack and have matching heads."""
    check_tokens(asked, cu_seqlens, k=k_TGK, v=v_THV, g=g_TH, beta=beta_TH)
    check_group(asked, v_THV.shape[1], k_TGK.shape[1])
    for name, gate in (("g", g_TH), ("beta", beta_TH)):
        check_shape(f"{asked}: {name}", gate, tuple(v_THV.shape[:2]))
