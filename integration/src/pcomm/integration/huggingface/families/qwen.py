"""Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from pcomm.integration.huggingface.families.decoder import (
    ATTENTION,
    DENSE_MLP,
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    FULL_ATTENTION,
    HEAD_NORMS,
    KV_HEADS,
    LAYER,
    LAYERS,
    NO_EFFECT_OF_EXPERTS,
    ROPE,
    SHAPE,
    STREAM,
    head_dim,
    kv_rows,
    q_rows,
)
from pcomm.integration.huggingface.families.family import Entry, Family, Fixed, Part

__all__ = ["QWEN2", "QWEN3", "QWEN3_MOE"]


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


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(
        *SHAPE,
        KV_HEADS,
        ROPE,
        LAYERS,
        head_dim(128),
        *FULL_ATTENTION,
        Fixed("attention_bias", False),
    ),
    keys={"qk_norm": True},
    tensors=(*STREAM, *ATTENTION, *HEAD_NORMS, *DENSE_MLP),
)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *SHAPE,
        KV_HEADS,
        ROPE,
        LAYERS,
        head_dim(None),
        *FULL_ATTENTION,
        *EXPERT_FIELDS,
        Fixed("attention_bias", False),
    ),
    keys={"qk_norm": True},
    tensors=(*STREAM, *ATTENTION, *HEAD_NORMS, *DENSE_MLP, *EXPERT_TENSORS),
    ignored_fields=NO_EFFECT_OF_EXPERTS,
)
