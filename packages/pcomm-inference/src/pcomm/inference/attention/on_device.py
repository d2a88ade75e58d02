"""Attention where keys and values lie on a GPU: one launch for all decodes, two for all prompts.

Tested on a CPU, in Triton's interpreter, by compiling for Hopper and Blackwell, and with tensors
that have no numbers; it has not run on a GPU yet.
"""

# Shape suffixes: T tokens of the step, t of one request, N requests, H query heads, G key and value
# heads, R query heads of a key head, K width of a key, V width of a value, M rows for each key
# head, B blocks of the longest request, L keys, C requests with chunks.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.inference.attention.scores import PLAIN, Softmax, attend_rows
from pcomm.inference.attention.turn import HeadTurn
from pcomm.inference.layers.flash_attention import varlen_call
from pcomm.inference.layers.residual_stream import has_triton
from pcomm.inference.model import KVMemory, StepBatch

__all__ = ["attend_on_device", "decode_by_copies", "write_new"]

# Bytes of the scores of one call, in fp32, where torch's attention cannot be given what changes
# them.
_SCORE_BYTES = 64 << 20


def attend_on_device(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    memory: KVMemory,
    batch: StepBatch,
    softmax: Softmax = PLAIN,
    window: int | None = None,
    turn: HeadTurn | None = None,
) -> Tensor:
    """What `paged_attention` does for blocks that are not on the host: `[T, H, V]`.

    Requests that decode are one launch of a kernel, which also turns their heads and writes their
    keys and values. Heads of chunks are turned and written in one launch. All chunks are one call
    where torch has one that takes them, otherwise each is one, and a copy. No wait for the device;
    where all requests decode, a captured graph serves every step with as many requests and as wide
    block tables.
    """
    num_decodes, num_tokens = batch.num_decodes, len(q_THK)
    if turn is not None and not _has_kernels(q_THK, memory):
        (q_THK, k_TGK), turn = turn.of(q_THK, k_TGK), None
    out_THV = None
    attend = _call_of_chunks(q_THK, memory, softmax) if num_decodes < num_tokens else None
    if num_decodes or batch.num_requests > 1 or attend is not None:
        out_THV = q_THK.new_empty(num_tokens, q_THK.shape[1], memory.values.shape[3])
    if num_decodes:
        assert out_THV is not None
        new = slice(num_decodes)
        own = None if turn is None else turn.of_tokens(new)
        _decode(
            (q_THK[new], k_TGK[new], v_TGV[new]), memory, batch, softmax, window, own, out_THV[new]
        )
    if num_decodes == num_tokens:
        assert out_THV is not None
        return out_THV
    rest = slice(num_decodes, num_tokens)
    q_THK, k_TGK, v_TGV = _written(
        (q_THK[rest], k_TGK[rest], v_TGV[rest]),
        memory,
        batch.slot_mapping_T[rest],
        None if turn is None else turn.of_tokens(rest),
    )
    if attend is not None:
        assert out_THV is not None
        _attend_chunks(
            attend, (q_THK, k_TGK, v_TGV), memory, batch, softmax.scale, window, out_THV[rest]
        )
        return out_THV
    for i in range(num_decodes, batch.num_requests):
        start, stop = batch.cu_seqlens[i], batch.cu_seqlens[i + 1]
        part = slice(start - num_decodes, stop - num_decodes)
        found = _chunk(q_THK[part], k_TGK[part], v_TGV[part], memory, batch, i, softmax, window)
        if out_THV is None:
            return found.contiguous()
        out_THV[start:stop] = found
    assert out_THV is not None
    return out_THV


def write_new(k_TGK: Tensor, v_TGV: Tensor, memory: KVMemory, slots_T: Tensor) -> None:
    """Keys and values of new tokens to their places. Local."""
    keys, values = memory.by_token
    if k_TGK.dtype != keys.dtype:
        k_TGK, v_TGV = k_TGK.to(keys.dtype), v_TGV.to(keys.dtype)
    keys.index_copy_(0, slots_T, k_TGK)
    values.index_copy_(0, slots_T, v_TGV)


def _has_kernels(q_THK: Tensor, memory: KVMemory) -> bool:
    if not has_triton():
        return False
    # Imported late: it imports Triton.
    from pcomm.inference.attention.decode_kernel import takes

    return takes(q_THK, memory)


def _written(
    new: tuple[Tensor, Tensor, Tensor], memory: KVMemory, slots_T: Tensor, turn: HeadTurn | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of chunks, of which the last two are in memory then, too."""
    q_THK, k_TGK, v_TGV = new
    if turn is None:
        write_new(k_TGK, v_TGV, memory, slots_T)
        return new
    from pcomm.inference.attention.turn_kernel import turn_launch

    turned = q_THK.new_empty(q_THK.shape), k_TGK.new_empty(k_TGK.shape)
    turn_launch(new, memory, slots_T, turn, *turned).run()
    return *turned, v_TGV


def _decode(
    new: tuple[Tensor, Tensor, Tensor],
    memory: KVMemory,
    batch: StepBatch,
    softmax: Softmax,
    window: int | None,
    turn: HeadTurn | None,
    out_NHV: Tensor,
) -> None:
    q_NHK, k_NGK, v_NGV = new
    count = len(q_NHK)
    places = batch.block_tables_NB[:count], batch.context_lens_N[:count]
    if _has_kernels(q_NHK, memory):
        from pcomm.inference.attention.decode_kernel import decode_launch

        decode_launch(new, memory, places, out_NHV, batch.prepared, softmax, window, turn).run()
        return
    write_new(k_NGK, v_NGV, memory, batch.slot_mapping_T[:count])
    out_NHV.copy_(decode_by_copies(q_NHK, memory, *places, softmax, window))


def decode_by_copies(
    q_NHK: Tensor,
    memory: KVMemory,
    tables_NB: Tensor,
    contexts_N: Tensor,
    softmax: Softmax = PLAIN,
    window: int | None = None,
) -> Tensor:
    """`[N, H, V]`, contiguous: the same without Triton, or of dtypes that the kernel does not take.

    Keys up to the end of the tables, or as many as the window has, are copied.

    Args:
        q_NHK: Queries of the new tokens.
        memory: Blocks of the layer, which hold the new tokens already.
        tables_NB: int32, blocks of the requests.
        contexts_N: int32, number of tokens before the new one.
        softmax: How scores become weights.
        window: Number of keys that a token sees; None for all.
    """
    num_requests, num_blocks = tables_NB.shape
    block_size, num_heads = memory.keys.shape[1:3]
    num_keys = num_blocks * block_size
    lengths_N1 = contexts_N.unsqueeze(1).long() + 1
    firsts_N1 = torch.zeros_like(lengths_N1)
    if window is not None and window < num_keys:
        num_keys = window
        firsts_N1 = (lengths_N1 - window).clamp_(min=0)
    places_NL = firsts_N1 + torch.arange(num_keys, device=q_NHK.device)
    # Places behind the newest token read that of the first key, which is the request's own.
    is_unseen_NL = places_NL >= lengths_N1
    places_NL = torch.where(is_unseen_NL, firsts_N1, places_NL)
    blocks_NL = tables_NB.gather(1, places_NL // block_size)
    slots_NL = blocks_NL * block_size + places_NL % block_size
    mask_NL = q_NHK.new_zeros(num_requests, num_keys).masked_fill_(is_unseen_NL, -torch.inf)

    def copied(pool: Tensor) -> Tensor:
        found = pool.flatten(0, 1).index_select(0, slots_NL.flatten())
        tokens = found.view(num_requests, num_keys, num_heads, -1)
        return tokens.transpose(1, 2).to(q_NHK.dtype)

    q_NGRK = q_NHK.view(num_requests, num_heads, -1, q_NHK.shape[2])
    mixed_NGRV = attend_rows(
        q_NGRK,
        copied(memory.keys),
        copied(memory.values),
        mask_NL[:, None, None],
        softmax,
        (lengths_N1 - 1 - firsts_N1)[:, :, None, None],
        q_NGRK.shape[2],
    )
    return mixed_NGRV.reshape(*q_NHK.shape[:2], -1).contiguous()


def _call_of_chunks(q_THK: Tensor, memory: KVMemory, softmax: Softmax) -> Callable[..., Any] | None:
    """Torch's attention of all chunks at once, written to a given place; None where it has none."""
    width = q_THK.shape[2]
    if not softmax.is_plain or memory.values.shape[3] != width:
        return None
    return varlen_call("varlen_attn_out", q_THK.device, q_THK.dtype, width)


@dataclass(frozen=True)
class _ChunkKeys:
    """Which keys the chunks of a step see, for all layers with such blocks and window.

    Attributes:
        offsets_C1: int32, offsets of the chunks in their tokens.
        key_offsets_C1: int32, those in their keys.
        most_new: Most tokens of a chunk.
        most_keys: Most keys of a chunk.
        slots_L: int64, places of the keys in memory; None if they are those of the new tokens.
    """

    offsets_C1: Tensor
    key_offsets_C1: Tensor
    most_new: int
    most_keys: int
    slots_L: Tensor | None

    @classmethod
    def of(cls, batch: StepBatch, block_size: int, window: int | None) -> _ChunkKeys:
        """Those of a batch: operations of the device, once a step."""
        first, contexts = batch.num_decodes, batch.context_lens[batch.num_decodes :]
        news = [stop - start for start, stop in pairwise(batch.cu_seqlens[first:])]
        offsets_C1 = batch.cu_seqlens_N1[first:]
        if first:
            offsets_C1 = offsets_C1 - first
        if not any(contexts):
            return cls(offsets_C1, offsets_C1, max(news), max(news), None)
        unseen = [0 if window is None else max(0, one + 1 - window) for one in contexts]
        lengths = [a - b + c for a, b, c in zip(contexts, unseen, news, strict=True)]
        contexts_C = batch.context_lens_N[first:]
        unseen_C = torch.zeros_like(contexts_C)
        if window is not None:
            unseen_C = (contexts_C + (1 - window)).clamp_(min=0)
        key_offsets_C1 = offsets_C1.clone()
        key_offsets_C1[1:] += (contexts_C - unseen_C).cumsum(0, dtype=torch.int32)
        # The place of each key in its request, and the row of the request.
        num_keys, device = sum(lengths), offsets_C1.device
        row_L = torch.repeat_interleave(key_offsets_C1.diff(), output_size=num_keys)
        place_L = torch.arange(num_keys, device=device)
        place_L += (unseen_C - key_offsets_C1[:-1]).index_select(0, row_L)
        block_L = batch.block_tables_NB[first + row_L, place_L // block_size].long()
        slots_L = block_L * block_size + place_L % block_size
        return cls(offsets_C1, key_offsets_C1, max(news), max(lengths), slots_L)


def _attend_chunks(
    attend: Callable[..., Any],
    new: tuple[Tensor, Tensor, Tensor],
    memory: KVMemory,
    batch: StepBatch,
    scale: float | None,
    window: int | None,
    out_THV: Tensor,
) -> None:
    """Write the rows of all chunks, whose new keys and values are in memory."""
    q_THK, k_TGK, v_TGV = new
    block_size = memory.keys.shape[1]
    key = (_ChunkKeys, block_size, window)
    seen: _ChunkKeys | None = batch.prepared.get(key)
    if seen is None:
        seen = batch.prepared[key] = _ChunkKeys.of(batch, block_size, window)
    if seen.slots_L is None:
        k_LGK, v_LGV = _as_kept(k_TGK, v_TGV, memory)
    else:
        k_LGK, v_LGV = (
            pool.index_select(0, seen.slots_L).to(q_THK.dtype) for pool in memory.by_token
        )
    attend(
        out_THV,
        q_THK,
        k_LGK,
        v_LGV,
        seen.offsets_C1,
        seen.key_offsets_C1,
        seen.most_new,
        seen.most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_THK.shape[1] != k_LGK.shape[1],
    )


def _as_kept(k_TGK: Tensor, v_TGV: Tensor, memory: KVMemory) -> tuple[Tensor, Tensor]:
    """New keys and values as they are in memory, which may have another dtype."""
    dtype = memory.keys.dtype
    return k_TGK.to(dtype).to(k_TGK.dtype), v_TGV.to(dtype).to(v_TGV.dtype)


def _chunk(
    q_tHK: Tensor,
    k_tGK: Tensor,
    v_tGV: Tensor,
    memory: KVMemory,
    batch: StepBatch,
    i: int,
    softmax: Softmax,
    window: int | None,
) -> Tensor:
    """`[t, H, V]` of request i, whose new keys and values are in memory."""
    num_new, context = len(q_tHK), batch.context_lens[i]
    first = 0 if window is None else max(0, context + 1 - window)
    if context:
        places_L = torch.arange(first, context + num_new, device=q_tHK.device)
        block_size = memory.keys.shape[1]
        blocks_L = batch.block_tables_NB[i].index_select(0, places_L // block_size)
        slots_L = blocks_L * block_size + places_L % block_size
        keys, values = memory.by_token
        k_LGK, v_LGV = (pool.index_select(0, slots_L).to(q_tHK.dtype) for pool in (keys, values))
    else:
        k_LGK, v_LGV = _as_kept(k_tGK, v_tGV, memory)
    k_1GLK, v_1GLV = (one.transpose(0, 1).unsqueeze(0) for one in (k_LGK, v_LGV))
    num_heads, num_groups, num_keys = q_tHK.shape[1], k_1GLK.shape[1], k_1GLK.shape[2]
    if softmax.is_plain and (window is None or context + num_new <= window):
        # It imports Torch's compiler, which takes as long as Torch itself.
        from torch.nn.attention.bias import causal_lower_right

        mixed_1HtV = F.scaled_dot_product_attention(
            q_tHK.transpose(0, 1).unsqueeze(0),
            k_1GLK,
            v_1GLV,
            causal_lower_right(num_new, num_keys) if context else None,
            is_causal=not context,
            scale=softmax.scale,
            enable_gqa=num_heads != num_groups,
        )
        return mixed_1HtV[0].transpose(0, 1)
    out_tHV = q_tHK.new_empty(num_new, num_heads, v_tGV.shape[2])
    rows = num_heads // num_groups
    most = max(1, _SCORE_BYTES // (4 * num_heads * num_keys))
    seen_L = torch.arange(num_keys, device=q_tHK.device)
    for start in range(0, num_new, most):
        part_tHK = q_tHK[start : start + most]
        q_1GMK = part_tHK.unflatten(1, (num_groups, rows)).transpose(0, 1).flatten(1, 2)[None]
        own_M1 = torch.arange(start, start + len(part_tHK), device=q_tHK.device)
        own_M1 = (own_M1 + context - first).repeat_interleave(rows).unsqueeze(1)
        is_unseen_ML = seen_L > own_M1
        if window is not None:
            is_unseen_ML |= seen_L <= own_M1 - window
        mask_ML = q_tHK.new_zeros(is_unseen_ML.shape).masked_fill_(is_unseen_ML, -torch.inf)
        mixed_1GMV = attend_rows(q_1GMK, k_1GLK, v_1GLV, mask_ML, softmax, own_M1, rows)
        mixed_GtRV = mixed_1GMV[0].unflatten(1, (len(part_tHK), rows))
        out_tHV[start : start + most] = mixed_GtRV.transpose(0, 1).flatten(1, 2)
    return out_tHV
