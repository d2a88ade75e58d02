"""Attention of one layer over a ragged batch, whose keys and values lie in blocks of a pool."""

# Shape suffixes: T tokens of the step, H query heads, G key and value heads, R query heads of a key
# head, K width of a key, V width of a value, N requests of one call, M rows for each key head,
# L keys, t tokens of one call.

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.inference.attention.on_device import attend_on_device, write_new
from pcomm.inference.attention.plan import (
    CausalMask,
    ChunkPlan,
    DecodeCall,
    KVIndices,
    plan_of,
    rounded_rows,
)
from pcomm.inference.attention.scores import Softmax, attend_rows
from pcomm.inference.attention.turn import HeadTurn
from pcomm.inference.model import KVMemory, StepBatch

__all__ = ["paged_attention"]


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
    turn: HeadTurn | None = None,
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
        q_THK: `[T, H, K]`, queries of the new tokens of all requests, positions applied unless
            there is a `turn`.
        k_TGK: `[T, G, K]`, keys of the same tokens, likewise.
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
        turn: Norm and rotation of queries and keys, which come as a projection gives them; on a GPU
            it is part of the kernels that write and read them. None where positions are applied.

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
    softmax = Softmax(scale, softcap, sinks_H, alibi_H)
    if window is not None or memory.window is not None or not softmax.is_plain:
        _check_scores(q_THK.shape[1], memory, window, softmax)
    if not memory.keys.is_cpu:
        return attend_on_device(q_THK, k_TGK, v_TGV, memory, batch, softmax, window, turn)
    if turn is not None:
        q_THK, k_TGK = turn.of(q_THK, k_TGK)
    plan = plan_of(batch, memory, q_THK, window)
    if plan.partial_blocks is not None:
        memory.keys.index_fill_(0, plan.partial_blocks, 0)
        memory.values.index_fill_(0, plan.partial_blocks, 0)
    write_new(k_TGK, v_TGV, memory, batch.slot_mapping_T)
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


def _check_scores(num_heads: int, memory: KVMemory, window: int | None, softmax: Softmax) -> None:
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


def _attend_decodes(q_NHK: Tensor, memory: KVMemory, call: DecodeCall, softmax: Softmax) -> Tensor:
    """`[N, H, V]`, contiguous, of the requests of one call, whose new tokens are in memory."""
    k_NGLK, v_NGLV = _keys_and_values(memory, call.indices, q_NHK)
    num_requests, num_heads, width = q_NHK.shape
    q_NGRK = q_NHK.view(num_requests, k_NGLK.shape[1], -1, width)
    places = None
    if softmax.alibi_H is not None:
        places = torch.tensor(call.lengths, device=q_NHK.device).view(-1, 1, 1, 1) - 1
    mixed_NGRV = attend_rows(
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
    softmax: Softmax,
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
        mixed_1GMV = attend_rows(
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


def _keys_and_values(memory: KVMemory, indices: KVIndices, q: Tensor) -> tuple[Tensor, Tensor]:
    """Copies `[N, G, L, K]` and `[N, G, L, V]` from the pools, in the dtype of the queries."""
    k_NGLK, v_NGLV = _copied(memory.keys, indices), _copied(memory.values, indices)
    if k_NGLK.dtype != q.dtype:
        return k_NGLK.to(q.dtype), v_NGLV.to(q.dtype)
    return k_NGLK, v_NGLV


def _copied(pool: Tensor, indices: KVIndices) -> Tensor:
    tokens = pool.index_select(0, indices.blocks).view(indices.num_requests, -1, *pool.shape[-2:])
    if tokens.shape[1] > indices.num_keys:
        tokens = tokens[:, : indices.num_keys]
    return tokens.transpose(1, 2)
