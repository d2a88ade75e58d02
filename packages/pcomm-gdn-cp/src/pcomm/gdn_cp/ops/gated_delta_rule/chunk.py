"""The work inside the chunks of the gated delta rule, done once for whatever follows.

What tokens write within a chunk does not depend on the state that enters it, up to one product
with the state. So a rank that first needs the summary of its tokens, and later, when the state
before them is known, their outputs, computes the chunks once.
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
from pcomm.gdn_cp.ops.carried_state import state_for_scan, state_for_user
from pcomm.gdn_cp.ops.chunk_layout import ChunkLayout, default_chunk, from_chunks, to_chunks
from pcomm.gdn_cp.ops.decayed_read import log_decay_since_start, pairwise_decay, read_chunks
from pcomm.gdn_cp.ops.gated_delta_rule.scan import chunk_inverse, delta_scan
from pcomm.gdn_cp.ops.inputs import check_group, check_shape, check_tokens
from pcomm.gdn_cp.ops.precision import compute_dtype

__all__ = ["DeltaChunks", "check_delta_inputs"]


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
        scan = delta_scan(
            self.k_MGCK,
            self.v_MGRCV,
            self.beta_MGRC,
            self.decay_MGRC,
            initial,
            self.pairwise_MGRCC,
            self.inverse_MGRCC,
            self.layout.step_sizes,
        )
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
        scan = delta_scan(
            self.k_MGCK,
            F.pad(self.v_MGRCV, (key_dim, 0)),
            self.beta_MGRC,
            self.decay_MGRC,
            start.expand(num_sequences, num_groups, key_dim, num_repeats, -1).contiguous(),
            self.pairwise_MGRCC,
            self.inverse_MGRCC,
            self.layout.step_sizes,
        )
        both = state_for_user(scan.final_NGKRV, self.layout)
        return both[..., :key_dim], both[..., key_dim:]


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
