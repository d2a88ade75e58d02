"""Qwen3: Llama's blocks with norms of queries and keys."""

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
from pcomm.integration.huggingface.families.family import Family
from pcomm.integration.huggingface.families.layer_kinds import FULL_ATTENTION, LAYERS, head_dim
from pcomm.integration.huggingface.families.rope import ROPE

__all__ = ["QWEN3"]

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
