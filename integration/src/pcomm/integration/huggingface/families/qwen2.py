"""Qwen2 and Qwen2.5: Llama's blocks with biases of queries, keys and values."""

from __future__ import annotations

from pcomm.integration.huggingface.config_table import Fixed
from pcomm.integration.huggingface.families.decoder import (
    ATTENTION,
    DENSE_MLP,
    KV_HEADS,
    LAYER,
    SHAPE,
    STREAM,
    kv_rows,
    q_rows,
)
from pcomm.integration.huggingface.families.family import Family
from pcomm.integration.huggingface.families.layer_kinds import FULL_ATTENTION, LAYERS, head_dim
from pcomm.integration.huggingface.families.rope import ROPE
from pcomm.integration.huggingface.tensor_table import Entry, Part

__all__ = ["QWEN2"]

_BIASES = Entry(
    "blocks.{layer}.mixer.qkv.bias",
    (
        Part(LAYER + "self_attn.q_proj.bias", q_rows),
        Part(LAYER + "self_attn.k_proj.bias", kv_rows),
        Part(LAYER + "self_attn.v_proj.bias", kv_rows),
    ),
    mixer="A",
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(
        *SHAPE,
        KV_HEADS,
        ROPE,
        LAYERS,
        head_dim(None),
        *FULL_ATTENTION,
        Fixed("use_mrope", False, is_written=False),
    ),
    keys={"qkv_bias": True},
    tensors=(*STREAM, *ATTENTION, _BIASES, *DENSE_MLP),
)
