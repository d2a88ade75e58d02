"""Attention of one layer over a ragged batch, whose keys and values lie in blocks of a pool."""

# Shape suffixes: T tokens of the step, H query heads, G key and value heads, K head dim.

from __future__ import annotations

from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.inference.attention.attend import attend_chunk, attend_one_token
from pcomm.inference.attention.decode_on_device import decode_on_device
from pcomm.inference.attention.planner import plan_of
from pcomm.inference.memory import KVMemory
from pcomm.inference.step_batch import StepBatch

__all__ = ["paged_attention"]


def paged_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    memory: KVMemory,
    batch: StepBatch,
    *,
    scale: float | None = None,
) -> Tensor:
    """Write the new keys and values to their blocks; each token attends to its request so far.

    Call it without gradients, under `torch.inference_mode()` for example. Local. Query heads
    `i * H / G` to `(i + 1) * H / G - 1` read key head i, which is not repeated in memory.

    On a CPU the bits of a row depend on its own request alone, whatever else is in the batch. In
    bf16 they do not depend either on how the prompt was cut into chunks, or whether the token was
    written or was part of a prompt, on processors with AVX-512 BF16. With AVX-512 without BF16 and
    with AVX2 single elements do. In fp32 and fp64 a row of a chunk agrees with the same row of
    another chunk up to rounding. `Engine(batch_invariant=True)` cuts a prompt alike in any company.

    Args:
        q_THK: `[T, H, K]`, queries of the new tokens of all requests, positions applied.
        k_TGK: `[T, G, K]`, keys of the same tokens, positions applied.
        v_TGK: `[T, G, K]`, values of the same tokens.
        memory: Blocks of this layer. The new tokens are written there; on a CPU the rest of a
            block that is begun is set to zero. Blocks of other requests are not read.
        batch: Tokens of the step, and the places of their requests.
        scale: Factor of the scores; `K ** -0.5` if absent.

    Returns:
        `[T, H, K]`, contiguous, dtype of `q_THK`.

    Raises:
        ConfigError: The layer has no keys and values, or shapes of queries, keys and blocks do not
            fit together.

    Source:
        Kwon et al., Efficient Memory Management for Large Language Model Serving with
        PagedAttention, 2023.
    """
    _check(q_THK, k_TGK, memory)
    if not memory.keys.is_cpu and batch.is_decode:
        _write(k_TGK, v_TGK, memory, batch)
        return decode_on_device(q_THK, memory, batch, scale)
    plan = plan_of(batch, memory, q_THK)
    if plan.begun_blocks is not None:
        memory.keys.index_fill_(0, plan.begun_blocks, 0)
        memory.values.index_fill_(0, plan.begun_blocks, 0)
    _write(k_TGK, v_TGK, memory, batch)
    calls = plan.one_token_calls
    if calls and calls[0].rows_N is None:
        return attend_one_token(q_THK, memory, calls[0], scale)
    out_THK = q_THK.new_empty(q_THK.shape)
    for call in calls:
        assert call.rows_N is not None
        q_NHK = q_THK.index_select(0, call.rows_N)
        out_THK.index_copy_(0, call.rows_N, attend_one_token(q_NHK, memory, call, scale))
    for chunk in plan.chunks:
        assert plan.causal_mask is not None
        attend_chunk(q_THK, memory, chunk, plan.causal_mask, out_THK, scale)
    return out_THK


def _write(k_TGK: Tensor, v_TGK: Tensor, memory: KVMemory, batch: StepBatch) -> None:
    keys, values = memory.by_token
    if k_TGK.dtype != keys.dtype:
        k_TGK, v_TGK = k_TGK.to(keys.dtype), v_TGK.to(keys.dtype)
    keys.index_copy_(0, batch.kv_slots_T, k_TGK)
    values.index_copy_(0, batch.kv_slots_T, v_TGK)


def _check(q_THK: Tensor, k_TGK: Tensor, memory: object) -> None:
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
    if k_TGK.shape != (num_tokens, *blocks[2:]) or blocks[3] != head_dim or num_heads % blocks[2]:
        raise ConfigError(
            f"paged_attention: queries {tuple(q_THK.shape)} and keys {tuple(k_TGK.shape)}",
            found=f"blocks of {blocks[1]} tokens with {blocks[2]} heads of {blocks[3]}",
            why="Keys have the heads of the blocks, and each key head serves as many query heads "
            "as every other.",
            fix="Declare the layer's key heads and their width in its KVSpec, and pass a number "
            "of query heads that is a multiple of that of key heads.",
        )
