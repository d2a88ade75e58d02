"""The gated delta rule over packed sequences, in chunks: the core of a Gated DeltaNet layer.

For each value head, with its key head's query q and key k, S is `[K, V]` and
  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q.
`gated_delta_recurrent` computes this as it stands; here chunks of tokens become matrix products.
"""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.cores.decayed_read import log_decay_since_start, pairwise_decay, read_chunks
from pcomm.gdn_cp.cores.gated_delta_scan import chunk_inverse, delta_scan
from pcomm.gdn_cp.cores.packing import ChunkLayout, from_chunks, to_chunks
from pcomm.gdn_cp.cores.precision import compute_dtype

__all__ = ["chunk_gated_delta_rule"]


def chunk_gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    dtype, layout = compute_dtype(v_THV), ChunkLayout.of(cu_seqlens, chunk)
    num_groups, key_dim = k_TGK.shape[1:]
    _, num_heads, value_dim = v_THV.shape
    q, k, v, g, beta = (
        to_chunks(x, layout).to(dtype) for x in (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
    )
    v, beta = (x.unflatten(1, (num_groups, -1)) for x in (v, beta))
    decay = log_decay_since_start(g, num_groups)
    pairs = pairwise_decay(decay)
    inverse = chunk_inverse(k, beta, pairs)
    indices = layout.indices(v.device)
    n = layout.num_sequences
    if initial_state is None:
        initial = v.new_zeros(n, num_groups, key_dim, num_heads // num_groups, value_dim)
    else:
        initial = initial_state.to(dtype)[indices.order_N].unflatten(1, (num_groups, -1)).transpose(2, 3)
    values, states, final = delta_scan(k, v, beta, decay, initial, pairs, inverse, layout.step_sizes)
    o = read_chunks(q, k, values, states, decay, pairs)
    final = final.transpose(2, 3).flatten(1, 2)[indices.rank_N]
    return from_chunks(o.flatten(1, 2), layout).to(v_THV.dtype), final
