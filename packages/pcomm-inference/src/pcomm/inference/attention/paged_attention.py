"""Attention of one layer over a ragged batch, whose keys and values lie in blocks of a pool."""

# Shape suffixes: T tokens of the step, H query heads, G key and value heads, R query heads of a key
# head, K width of a key, V width of a value, N requests of one call, M rows for each key head,
# L keys, t tokens of one call.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.errors import ConfigError
from pcomm.inference.attention.plan import (
    CausalMask,
    ChunkPlan,
    DecodeCall,
    KVIndices,
    plan_of,
    rounded_rows,
    units_of,
)
from pcomm.inference.model import KVMemory, StepBatch

__all__ = ["decode_on_device", "paged_attention"]


def paged_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    memory: KVMemory,
    batch: StepBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    alibi_H: Tensor | None = None,
) -> Tensor:
    """Write the new keys and values to their blocks; each token attends to its request so far.

    Call it without gradients, under `torch.inference_mode()` for example. Local. Query heads
    `i * H / G` to `(i + 1) * H / G - 1` read key head i, which is not repeated in memory.

    On a CPU the bits of a row depend on its own request alone, whatever else is in the batch. In
    bf16 they do not depend either on how the prompt was cut into chunks, or whether the token was
    written or was part of a prompt, on processors with AVX-512 BF16. With AVX-512 without BF16 and
    with AVX2 single elements do. In fp32 and fp64 a row of a chunk agrees with the same row of
    another chunk up to rounding, and so it does in bf16 with a cap, sinks or slopes, and behind a
    window that is exceeded. `Engine(batch_invariant=True)` cuts a prompt alike in any company.

    With a window the blocks before it are not read, so a token costs no more in a longer text.

    Args:
        q_THK: `[T, H, K]`, queries of the new tokens of all requests, positions applied.
        k_TGK: `[T, G, K]`, keys of the same tokens, positions applied.
        v_TGV: `[T, G, V]`, values of the same tokens.
        memory: Blocks of this layer. The new tokens are written there; on a CPU the rest of a
            block that is begun is set to zero. Blocks of other requests are not read.
        batch: Tokens of the step, and the places of their requests.
        scale: Factor of the scores; `K ** -0.5` if absent.
        window: Number of keys that a token sees, its own among them; None for all before it. At
            most that of the layer's `KVSpec`, if that has one.
        softcap: c, where scores are `c * tanh(score / c)` before the softmax; None for no cap.
        sinks_H: `[H]`, a score of each query head that takes part in its softmax and has no value;
            None for none. With a cap it is not capped.
        alibi_H: `[H]`, a slope of each query head: the score of token i and key j gets
            `slope * (j - i)`, behind a cap; None for none.

    Returns:
        `[T, H, V]`, contiguous, dtype of `q_THK`.

    Raises:
        ConfigError: The layer has no keys and values, shapes of queries, keys, blocks, sinks and
            slopes do not fit together, the window is no number of keys or longer than that of the
            layer's `KVSpec`, or the cap is not above 0.

    Source:
        Kwon et al., Efficient Memory Management for Large Language Model Serving with
        PagedAttention, 2023. Press et al., Train Short, Test Long: Attention with Linear Biases
        Enables Input Length Extrapolation, 2022.
    """
    _check(q_THK, k_TGK, v_TGV, memory)
    softmax = _Softmax(scale, softcap, sinks_H, alibi_H)
    if window is not None or memory.window is not None or not softmax.is_plain:
        _check_scores(q_THK.shape[1], memory, window, softmax)
    if not memory.keys.is_cpu and batch.is_decode:
        _write(k_TGK, v_TGV, memory, batch)
        return decode_on_device(q_THK, memory, batch, softmax, window)
    plan = plan_of(batch, memory, q_THK, window)
    if plan.partial_blocks is not None:
        memory.keys.index_fill_(0, plan.partial_blocks, 0)
        memory.values.index_fill_(0, plan.partial_blocks, 0)
    _write(k_TGK, v_TGV, memory, batch)
    calls = plan.decode_calls
    if calls and calls[0].rows_N is None:
        return _attend_decodes(q_THK, memory, calls[0], softmax)
    out_THV = q_THK.new_empty((*q_THK.shape[:2], memory.values.shape[3]))
    for call in calls:
        assert call.rows_N is not None
        q_NHK = q_THK.index_select(0, call.rows_N)
        out_THV.index_copy_(0, call.rows_N, _attend_decodes(q_NHK, memory, call, softmax))
    for chunk in plan.chunks:
        assert plan.causal_mask is not None
        _attend_chunk(q_THK, memory, chunk, plan.causal_mask, out_THV, softmax)
    return out_THV


class _Softmax(NamedTuple):
    """How scores become weights: what `paged_attention` is given beside tensors and places."""

    scale: float | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    alibi_H: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention computes it."""
        return self.softcap is None and self.sinks_H is None and self.alibi_H is None


_PLAIN = _Softmax()


def _check(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, memory: object) -> None:
    if not isinstance(memory, KVMemory):
        kind = type(memory).__name__
        raise ConfigError(
            "paged_attention: memory",
            found="that of a layer with nothing in memory" if memory is None else f"a {kind}",
            why="Keys and values lie in the blocks of a layer that declares a KVSpec.",
            fix="Declare a KVSpec for this layer, or pass the memory of the layer that declares "
            "one: they come in the order of memory_specs().",
        )
    num_tokens, num_heads, head_dim = q_THK.shape
    blocks = memory.keys.shape
    is_whole = v_TGV.shape == (num_tokens, *memory.values.shape[2:])
    if (
        k_TGK.shape != (num_tokens, *blocks[2:])
        or not is_whole
        or blocks[3] != head_dim
        or num_heads % blocks[2]
    ):
        raise ConfigError(
            f"paged_attention: queries {tuple(q_THK.shape)}, keys {tuple(k_TGK.shape)} and values "
            f"{tuple(v_TGV.shape)}",
            found=f"blocks of {blocks[1]} tokens with {blocks[2]} heads of {blocks[3]}, and values "
            f"of {memory.values.shape[3]}",
            why="Keys have the heads of the blocks, and each key head serves as many query heads "
            "as every other.",
            fix="Declare the layer's key heads and their width in its KVSpec, and pass a number "
            "of query heads that is a multiple of that of key heads.",
        )


def _check_scores(num_heads: int, memory: KVMemory, window: int | None, softmax: _Softmax) -> None:
    kept, cap = memory.window, softmax.softcap
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        window = 0
    if (window is not None and window < 1) or (kept and (window is None or window > kept)):
        raise ConfigError(
            f"paged_attention: window={window}",
            found=f"a layer whose KVSpec has window={kept}",
            why="A token sees its own key, and those before the window of the KVSpec may be gone.",
            fix="Pass a window from 1 to that of the KVSpec, or declare the KVSpec without one.",
        )
    if cap is not None and not cap > 0:
        raise ConfigError(
            f"paged_attention: softcap={cap}",
            found="a cap that is not above 0",
            why="Scores are divided by it.",
            fix="Pass None for scores without a cap.",
        )
    for name, given in (("sinks_H", softmax.sinks_H), ("alibi_H", softmax.alibi_H)):
        if given is not None and given.shape != (num_heads,):
            raise ConfigError(
                f"paged_attention: {name} of shape {tuple(given.shape)}",
                found=f"queries of {num_heads} heads",
                why="Each query head has one number.",
                fix=f"Pass a tensor of shape ({num_heads},): those of this rank's heads.",
            )


def _write(k_TGK: Tensor, v_TGV: Tensor, memory: KVMemory, batch: StepBatch) -> None:
    keys, values = memory.by_token
    if k_TGK.dtype != keys.dtype:
        k_TGK, v_TGV = k_TGK.to(keys.dtype), v_TGV.to(keys.dtype)
    keys.index_copy_(0, batch.slot_mapping_T, k_TGK)
    values.index_copy_(0, batch.slot_mapping_T, v_TGV)


def _attend_decodes(q_NHK: Tensor, memory: KVMemory, call: DecodeCall, softmax: _Softmax) -> Tensor:
    """`[N, H, V]`, contiguous, of the requests of one call, whose new tokens are in memory."""
    k_NGLK, v_NGLV = _keys_and_values(memory, call.indices, q_NHK)
    num_requests, num_heads, width = q_NHK.shape
    q_NGRK = q_NHK.view(num_requests, k_NGLK.shape[1], -1, width)
    places = None
    if softmax.alibi_H is not None:
        places = torch.tensor(call.lengths, device=q_NHK.device).view(-1, 1, 1, 1) - 1
    mixed_NGRV = _attend_rows(
        q_NGRK, k_NGLK, v_NGLV, call.mask_N11L, softmax, places, q_NGRK.shape[2]
    )
    # With one row for each key head, a cut of the rows that were added is a view with gaps.
    return mixed_NGRV.reshape(num_requests, num_heads, -1).contiguous()


def _attend_chunk(
    q_THK: Tensor,
    memory: KVMemory,
    chunk: ChunkPlan,
    mask: CausalMask,
    out_THV: Tensor,
    softmax: _Softmax,
) -> None:
    """Write the rows of one chunk, a few tokens a call, each with the keys up to its last token."""
    k_1GLK, v_1GLV = _keys_and_values(memory, chunk.indices, q_THK)
    num_heads, head_dim = k_1GLK.shape[1], k_1GLK.shape[3]
    rows_per_token = q_THK.shape[1] // num_heads
    for call in chunk.calls:
        stop, last_key = call.start + call.num_tokens, call.first_key + call.num_keys
        q_tGRK = q_THK[call.start : stop].view(call.num_tokens, num_heads, -1, head_dim)
        q_1GMK = q_tGRK.transpose(0, 1).reshape(1, num_heads, -1, head_dim)
        num_rows = rounded_rows(q_1GMK.shape[2], q_THK.dtype)
        places = None
        if softmax.alibi_H is not None:
            rows_M1 = torch.arange(num_rows, device=q_THK.device).unsqueeze(1)
            places = rows_M1 // rows_per_token + call.own_key
        mixed_1GMV = _attend_rows(
            q_1GMK,
            k_1GLK[:, :, call.first_key : last_key],
            v_1GLV[:, :, call.first_key : last_key],
            mask.of_call(call.own_key, num_rows, call.num_keys),
            softmax,
            places,
            rows_per_token,
        )
        mixed_GtRV = mixed_1GMV.view(num_heads, call.num_tokens, rows_per_token, -1)
        out_tGRV = out_THV[call.start : stop].view(*q_tGRK.shape[:3], -1)
        out_tGRV.copy_(mixed_GtRV.transpose(0, 1))


def decode_on_device(
    q_NHK: Tensor,
    memory: KVMemory,
    batch: StepBatch,
    softmax: _Softmax = _PLAIN,
    window: int | None = None,
) -> Tensor:
    """`[N, H, V]`, contiguous: one new token of every request. No wait for the device.

    Shapes depend on the shapes of the batch alone, so that a captured graph serves every step with
    as many requests and as wide block tables. Keys up to the end of the tables, or as many as the
    window has, are copied: the engine hands tables no wider than the longest request of the step
    (or of the graph) needs.

    Tested on a CPU, and with tensors that have no numbers; it has not run on a GPU yet.

    Args:
        q_NHK: Queries of the new tokens.
        memory: Blocks of the layer, which hold the new tokens already.
        batch: Tokens of the step.
        softmax: How scores become weights.
        window: Number of keys that a token sees; None for all.
    """
    num_requests, num_blocks = batch.block_tables_NB.shape
    block_size, num_heads = memory.keys.shape[1:3]
    num_keys = num_blocks * block_size
    lengths_N1 = batch.context_lens_N.unsqueeze(1).long() + 1
    firsts_N1 = None
    if window is not None and window < num_keys:
        num_keys = window
        firsts_N1 = (lengths_N1 - window).clamp_(min=0)
    slots_NL = units_of(
        batch.block_tables_NB,
        lengths_N1,
        num_keys,
        block_size,
        is_by_block=False,
        firsts_N1=firsts_N1,
    )
    last_N1 = lengths_N1 - 1 if firsts_N1 is None else lengths_N1 - 1 - firsts_N1
    is_unseen_NL = torch.arange(num_keys, device=slots_NL.device) > last_N1
    mask_NL = q_NHK.new_zeros(num_requests, num_keys).masked_fill_(is_unseen_NL, -torch.inf)

    def copied(pool: Tensor) -> Tensor:
        found = pool.flatten(0, 1).index_select(0, slots_NL.flatten())
        tokens = found.view(num_requests, num_keys, num_heads, -1)
        return tokens.transpose(1, 2).to(q_NHK.dtype)

    q_NGRK = q_NHK.view(num_requests, num_heads, -1, q_NHK.shape[2])
    mixed_NGRV = _attend_rows(
        q_NGRK,
        copied(memory.keys),
        copied(memory.values),
        mask_NL[:, None, None],
        softmax,
        last_N1[:, :, None, None],
        q_NGRK.shape[2],
    )
    return mixed_NGRV.reshape(*q_NHK.shape[:2], -1).contiguous()


def _attend_rows(
    q_NGMK: Tensor,
    k_NGLK: Tensor,
    v_NGLV: Tensor,
    mask: Tensor | None,
    softmax: _Softmax,
    places: Tensor | None,
    rows_per_token: int,
) -> Tensor:
    """`[N, G, M, V]`: torch's attention, in a call with `rounded_rows` rows.

    Queries that read one key head are rows of one matrix. The mask has as many rows as the call, or
    one for all. So have `places`, those of the tokens among the L keys, which slopes need.
    """
    num_rows, width, value_width = q_NGMK.shape[2], q_NGMK.shape[3], v_NGLV.shape[3]
    num_added = rounded_rows(num_rows, q_NGMK.dtype) - num_rows
    if num_added:
        q_NGMK = F.pad(q_NGMK, (0, 0, 0, num_added))
    scale = width**-0.5 if softmax.scale is None else softmax.scale
    if not softmax.is_plain:
        mixed = _attend_by_scores(
            q_NGMK, k_NGLK, v_NGLV, mask, softmax, scale, places, rows_per_token
        )
    elif width == value_width:
        mixed = F.scaled_dot_product_attention(q_NGMK, k_NGLK, v_NGLV, mask, scale=softmax.scale)
    else:
        # Torch has a fast way on a CPU, whose bits are known, for keys and values of one width.
        both = max(width, value_width)
        q_NGMK, k_NGLK, v_NGLV = (
            F.pad(one, (0, both - one.shape[3])) for one in (q_NGMK, k_NGLK, v_NGLV)
        )
        mixed = F.scaled_dot_product_attention(q_NGMK, k_NGLK, v_NGLV, mask, scale=scale)
        mixed = mixed[..., :value_width]
    return mixed[:, :, :num_rows] if num_added else mixed


def _attend_by_scores(
    q_NGMK: Tensor,
    k_NGLK: Tensor,
    v_NGLV: Tensor,
    mask: Tensor | None,
    softmax: _Softmax,
    scale: float,
    places: Tensor | None,
    rows_per_token: int,
) -> Tensor:
    """`[N, G, M, V]` by the scores themselves, which torch's attention does not show.

    In fp32 where queries have 16 bits: scores of 50, as they are with a cap, would be rounded to
    quarters.
    """
    given = q_NGMK.dtype
    dtype = torch.float32 if given.itemsize == 2 else given
    q_NGMK, k_NGLK, v_NGLV = (one.to(dtype) for one in (q_NGMK, k_NGLK, v_NGLV))
    rows_M = torch.arange(q_NGMK.shape[2], device=q_NGMK.device) % rows_per_token

    def of_rows(numbers_H: Tensor) -> Tensor:
        numbers_GR = numbers_H.to(dtype).view(q_NGMK.shape[1], -1)
        return numbers_GR.index_select(1, rows_M).unsqueeze(2)

    scores_NGML = (q_NGMK @ k_NGLK.transpose(2, 3)).mul_(scale)
    if softmax.softcap is not None:
        scores_NGML.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    if softmax.alibi_H is not None:
        assert places is not None
        distances = torch.arange(k_NGLK.shape[2], device=q_NGMK.device) - places
        scores_NGML.addcmul_(of_rows(softmax.alibi_H), distances.to(dtype))
    if mask is not None:
        scores_NGML.add_(mask)
    largest_NGM1 = scores_NGML.amax(3, keepdim=True)
    if softmax.sinks_H is None:
        weights_NGML = scores_NGML.sub_(largest_NGM1).exp_()
        sums_NGM1 = weights_NGML.sum(3, keepdim=True)
    else:
        sinks_GM1 = of_rows(softmax.sinks_H)
        largest_NGM1 = torch.maximum(largest_NGM1, sinks_GM1)
        weights_NGML = scores_NGML.sub_(largest_NGM1).exp_()
        sums_NGM1 = weights_NGML.sum(3, keepdim=True) + (sinks_GM1 - largest_NGM1).exp()
    return (weights_NGML @ v_NGLV).div_(sums_NGM1).to(given)


def _keys_and_values(memory: KVMemory, indices: KVIndices, q: Tensor) -> tuple[Tensor, Tensor]:
    """Copies `[N, G, L, K]` and `[N, G, L, V]` from the pools, in the dtype of the queries."""
    keys, values = (memory.keys, memory.values) if indices.is_by_block else memory.by_token
    k_NGLK, v_NGLV = _copied(keys, indices), _copied(values, indices)
    if k_NGLK.dtype != q.dtype:
        return k_NGLK.to(q.dtype), v_NGLV.to(q.dtype)
    return k_NGLK, v_NGLV


def _copied(pool: Tensor, indices: KVIndices) -> Tensor:
    # Tokens side by side, whatever a unit is.
    tokens = pool.index_select(0, indices.units).view(indices.num_requests, -1, *pool.shape[-2:])
    if tokens.shape[1] > indices.num_keys:
        tokens = tokens[:, : indices.num_keys]
    return tokens.transpose(1, 2)
