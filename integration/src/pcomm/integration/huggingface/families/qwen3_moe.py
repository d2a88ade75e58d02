"""Qwen3-MoE: Qwen3's attention, and experts in some blocks or all."""

from __future__ import annotations

from pcomm.integration.huggingface.config_table import Fixed
from pcomm.integration.huggingface.families.decoder import (
    ATTENTION,
    DENSE_MLP,
    HEAD_NORMS,
    KV_HEADS,
    SHAPE,
    STREAM,
)
from pcomm.integration.huggingface.families.experts import (
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    NO_EFFECT_OF_EXPERTS,
)
from pcomm.integration.huggingface.families.family import Family
from pcomm.integration.huggingface.families.layer_kinds import FULL_ATTENTION, LAYERS, head_dim
from pcomm.integration.huggingface.families.rope import ROPE

__all__ = ["QWEN3_MOE"]

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
