"""Llama, and what has its shape: TinyLlama, SmolLM, and others."""

from __future__ import annotations

from pcomm.integration.huggingface.families.decoder import (
    ATTENTION,
    DENSE_MLP,
    LAYERS,
    ROPE,
    SHAPE,
    STREAM,
    head_dim,
)
from pcomm.integration.huggingface.families.family import Family, Fixed, Same

__all__ = ["LLAMA"]

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *SHAPE,
        ROPE,
        LAYERS,
        Same("num_key_value_heads", "kv_heads", default="auto"),
        head_dim(None),
        Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
        Fixed("rope_interleaved", False, is_written=False),
    ),
    keys={"qk_norm": False, "qkv_bias": False},
    tensors=(*STREAM, *ATTENTION, *DENSE_MLP),
    # Files of earlier versions hold the angles.
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    ignored_fields=("pretraining_tp", "is_llama_config", "is_custom_code", "mlp_dropout"),
)
