"""Calls of torch's attention: all queries that read one key head are rows of one matrix."""

# Shape suffixes: T tokens of the step, H query heads, G key heads, R query heads of a key head, K
# head dim, N requests of one call, M rows for each key head, L keys, t tokens of one call.

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from pcomm.inference.attention.masks import CausalMask
from pcomm.inference.attention.plan import KeyPlaces, OneTokenCall, PromptChunk
from pcomm.inference.attention.planner import tokens_of_a_call
from pcomm.inference.attention.rounding import rounded_keys, rounded_rows
from pcomm.inference.memory import KVMemory

__all__ = ["attend_chunk", "attend_one_token", "attend_rows"]


def attend_one_token(
    q_NHK: Tensor, memory: KVMemory, call: OneTokenCall, scale: float | None
) -> Tensor:
    """`[N, H, K]`, contiguous, of the requests of one call.

    Args:
        q_NHK: Queries of their new tokens.
        memory: Blocks of the layer, which hold the new tokens already.
        call: The requests.
        scale: Factor of the scores; None for torch's.
    """
    k_NGLK, v_NGLK = _keys_and_values(memory, call.places, q_NHK)
    num_requests, num_heads, head_dim = q_NHK.shape
    q_NGRK = q_NHK.view(num_requests, k_NGLK.shape[1], -1, head_dim)
    mixed_NGRK = attend_rows(q_NGRK, k_NGLK, v_NGLK, call.mask_N11L, scale)
    # With one row for each key head, a cut of the rows that were added is a view with gaps.
    return mixed_NGRK.reshape(num_requests, num_heads, head_dim).contiguous()


def attend_chunk(
    q_THK: Tensor,
    memory: KVMemory,
    chunk: PromptChunk,
    mask: CausalMask,
    out_THK: Tensor,
    scale: float | None,
) -> None:
    """Write the rows of one chunk, a few tokens a call, each with the keys up to its last token.

    Args:
        q_THK: Queries of the step.
        memory: Blocks of the layer, which hold the new tokens already.
        chunk: The request.
        mask: The plan's causal masks.
        out_THK: Result of the step.
        scale: Factor of the scores; None for torch's.
    """
    k_1GLK, v_1GLK = _keys_and_values(memory, chunk.places, q_THK)
    num_heads, head_dim = k_1GLK.shape[1], k_1GLK.shape[3]
    rows_per_token = q_THK.shape[1] // num_heads
    most = tokens_of_a_call(rows_per_token)
    for done in range(0, chunk.num_new, most):
        num_tokens = min(most, chunk.num_new - done)
        first, start = chunk.context + done, chunk.start + done
        num_keys = rounded_keys(first + num_tokens)
        q_tGRK = q_THK[start : start + num_tokens].view(num_tokens, num_heads, -1, head_dim)
        q_1GMK = q_tGRK.transpose(0, 1).reshape(1, num_heads, -1, head_dim)
        num_rows = rounded_rows(q_1GMK.shape[2], q_THK.dtype)
        mixed_1GMK = attend_rows(
            q_1GMK,
            k_1GLK[:, :, :num_keys],
            v_1GLK[:, :, :num_keys],
            mask.of_call(first, num_rows, num_keys),
            scale,
        )
        mixed_GtRK = mixed_1GMK.view(num_heads, num_tokens, rows_per_token, head_dim)
        out_THK[start : start + num_tokens].view_as(q_tGRK).copy_(mixed_GtRK.transpose(0, 1))


def attend_rows(
    q_NGMK: Tensor,
    k_NGLK: Tensor,
    v_NGLK: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """`[N, G, M, K]`: attention, in a call with `rounded_rows` rows.

    Args:
        q_NGMK: Queries, those that read one key head side by side.
        k_NGLK: Keys.
        v_NGLK: Values.
        mask: Mask of as many rows as the call has then, or of one for all.
        scale: Factor of the scores; None for torch's.
    """
    num_rows = q_NGMK.shape[2]
    num_added = rounded_rows(num_rows, q_NGMK.dtype) - num_rows
    if num_added:
        q_NGMK = F.pad(q_NGMK, (0, 0, 0, num_added))
    mixed = F.scaled_dot_product_attention(q_NGMK, k_NGLK, v_NGLK, mask, scale=scale)
    return mixed[:, :, :num_rows] if num_added else mixed


def _keys_and_values(memory: KVMemory, places: KeyPlaces, q: Tensor) -> tuple[Tensor, Tensor]:
    """Copies `[N, G, L, K]` from the pools, in the dtype of the queries."""
    keys, values = (memory.keys, memory.values) if places.is_by_block else memory.by_token
    k_NGLK, v_NGLK = _copied(keys, places), _copied(values, places)
    if k_NGLK.dtype != q.dtype:
        return k_NGLK.to(q.dtype), v_NGLK.to(q.dtype)
    return k_NGLK, v_NGLK


def _copied(pool: Tensor, places: KeyPlaces) -> Tensor:
    # Tokens side by side, whatever a unit is.
    tokens = pool.index_select(0, places.units).view(places.num_requests, -1, *pool.shape[-2:])
    if tokens.shape[1] > places.num_keys:
        tokens = tokens[:, : places.num_keys]
    return tokens.transpose(1, 2)
