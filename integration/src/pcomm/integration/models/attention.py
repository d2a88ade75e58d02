"""Causal grouped-query attention over packed sequences."""

# Shape suffixes: T tokens, D width, H query heads, G key and value heads, K head dim,
# N sequences of equal length L. Heads are this rank's share.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.integration.config import ModelConfig
from pcomm.integration.models.context import Context, KeyValueCache
from pcomm.integration.models.norm import RMSNorm
from pcomm.integration.models.rotary import rotate
from pcomm.integration.models.sequences import PackedSequences

__all__ = ["Attention", "packed_attention"]


class Attention(nn.Module):
    """The attention mixer of a block; heads are split over the tensor-parallel ranks.

    Queries, keys and values come from one weight, whose layout says which rank holds which heads
    of each of the three.

    Args:
        config: With every size filled in.
        collectives: Of the tensor-parallel group.
        sequence_parallel: Whether input and output are this rank's share of the tokens.
        index: Which layer's cache is ours.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        collectives: Collectives,
        *,
        sequence_parallel: bool,
        index: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size, unit = collectives.size, config.head_dim
        heads = Layout.even(config.heads * unit, size, unit=unit)
        kv_heads = Layout.even(config.kv_heads * unit, size, unit=unit)
        self.index, self.head_dim = index, unit
        self.num_heads = heads.sizes[collectives.rank] // unit
        self.num_kv_heads = kv_heads.sizes[collectives.rank] // unit
        self.qkv = ColumnParallelLinear(
            config.width,
            Layout.sections([heads, kv_heads, kv_heads]),
            collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.output = RowParallelLinear(
            heads,
            config.width,
            collectives,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            # All heads share the weight, and each rank has only some heads.
            self.q_norm, self.k_norm = (
                RMSNorm(
                    unit,
                    config.norm_eps,
                    has_partial_gradient=size > 1,
                    device=device,
                    dtype=dtype,
                )
                for _ in range(2)
            )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`; collective over the tensor-parallel group."""
        num_q, num_kv = self.num_heads, self.num_kv_heads
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q_THK, k_TGK, v_TGK = heads.split([num_q, num_kv, num_kv], -2)
        if self.q_norm is not None and self.k_norm is not None:
            q_THK, k_TGK = self.q_norm(q_THK), self.k_norm(k_TGK)
        q_THK, k_TGK = rotate(q_THK, context.rotation), rotate(k_TGK, context.rotation)
        if context.cache is None:
            mixed_THK = packed_attention(q_THK, k_TGK, v_TGK, context.sequences)
        else:
            cache = context.cache[self.index]
            assert isinstance(cache, KeyValueCache)
            mixed_THK = _cached_attention(q_THK, k_TGK, v_TGK, cache)
        output: Tensor = self.output(mixed_THK.flatten(-2))
        return output

    def new_cache(self, max_tokens: int) -> KeyValueCache:
        """What this layer keeps of a sequence while text is written."""
        return KeyValueCache(max_tokens)


def packed_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, sequences: PackedSequences
) -> Tensor:
    """Causal attention of each sequence with itself alone; local.

    Neighbouring sequences of equal length are one call of torch's scaled_dot_product_attention,
    so nothing is computed that a mask would throw away. The buffer is cut by `split`, whose
    backward is one concatenation; slices would each write a gradient of the whole buffer.

    Args:
        q_THK: Queries.
        k_TGK: Keys; H is a multiple of G, and neighbouring query heads share one.
        v_TGK: Values.
        sequences: Over T tokens.

    Returns:
        `[T, H, K]`.
    """
    runs = sequences.runs
    if len(runs) == 1:
        return _equal_sequences(q_THK, k_TGK, v_TGK, runs[0][0])
    lengths = [count * length for count, length in runs]
    queries, keys, values = (x.split(lengths) for x in (q_THK, k_TGK, v_TGK))
    return torch.cat(
        [
            _equal_sequences(q, k, v, count)
            for q, k, v, (count, _) in zip(queries, keys, values, runs, strict=True)
        ]
    )


def _equal_sequences(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    q_NHLK, k_NGLK, v_NGLK = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    mixed_NHLK = F.scaled_dot_product_attention(
        q_NHLK, k_NGLK, v_NGLK, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed_NHLK.transpose(1, 2).flatten(0, 1)


def _cached_attention(q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache) -> Tensor:
    """Attention of the last tokens of one sequence with all of it so far."""
    is_start = cache.length == 0
    # One new token sees everything; several are a prompt, which comes first.
    assert is_start or q.shape[0] == 1, "a prompt is read at once, then token by token"
    all_k, all_v = cache.append(k, v)
    mixed_HLK = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        all_k.transpose(0, 1),
        all_v.transpose(0, 1),
        is_causal=is_start,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed_HLK.transpose(0, 1)
