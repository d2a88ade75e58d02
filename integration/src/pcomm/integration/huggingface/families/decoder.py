"""What the tables of all families with Llama's blocks have in common."""

from __future__ import annotations

from pcomm.integration.config_resolved import ResolvedModel
from pcomm.integration.huggingface.config_table import Field, Fixed, Same
from pcomm.integration.huggingface.tensor_table import Entry, Part

__all__ = [
    "ATTENTION",
    "DENSE_MLP",
    "HEAD_NORMS",
    "KV_HEADS",
    "LAYER",
    "SHAPE",
    "STREAM",
    "kv_rows",
    "mlp_rows",
    "q_rows",
]

LAYER = "model.layers.{layer}."


def q_rows(config: ResolvedModel) -> int:
    """Rows of the queries."""
    return config.heads * config.head_dim


def kv_rows(config: ResolvedModel) -> int:
    """Rows of the keys, and of the values."""
    return config.kv_heads * config.head_dim


def mlp_rows(config: ResolvedModel) -> int:
    """Hidden width of the MLP."""
    assert isinstance(config.mlp_width, int), "a block without an MLP has no such tensor"
    return config.mlp_width


KV_HEADS: Field = Same("num_key_value_heads", "kv_heads")
"""Key and value heads, where the number of an absent field differs from that of the heads."""

SHAPE: tuple[Field, ...] = (
    Same("hidden_size", "width"),
    Same("num_attention_heads", "heads"),
    Same("intermediate_size", "mlp_width"),
    Same("rms_norm_eps", "norm_eps", default=1e-6),
    Same("tie_word_embeddings", "tie_embeddings", default=False),
    Fixed("hidden_act", "silu"),
)
"""Fields of every decoder."""

STREAM = (
    Entry("embedding.weight", (Part("model.embed_tokens.weight"),)),
    Entry("norm.weight", (Part("model.norm.weight"),)),
    Entry("head.weight", (Part("lm_head.weight"),)),
    Entry("blocks.{layer}.mixer_norm.weight", (Part(LAYER + "input_layernorm.weight"),)),
    Entry("blocks.{layer}.mlp_norm.weight", (Part(LAYER + "post_attention_layernorm.weight"),)),
)
"""Embedding, head, and the norms of the residual stream."""

ATTENTION = (
    Entry(
        "blocks.{layer}.mixer.qkv.weight",
        (
            Part(LAYER + "self_attn.q_proj.weight", q_rows),
            Part(LAYER + "self_attn.k_proj.weight", kv_rows),
            Part(LAYER + "self_attn.v_proj.weight", kv_rows),
        ),
        mixer="A",
    ),
    Entry(
        "blocks.{layer}.mixer.output.weight",
        (Part(LAYER + "self_attn.o_proj.weight"),),
        mixer="A",
    ),
)
"""Attention without biases."""

HEAD_NORMS = (
    Entry(
        "blocks.{layer}.mixer.q_norm.weight", (Part(LAYER + "self_attn.q_norm.weight"),), mixer="A"
    ),
    Entry(
        "blocks.{layer}.mixer.k_norm.weight", (Part(LAYER + "self_attn.k_norm.weight"),), mixer="A"
    ),
)
"""Norms of queries and keys."""

DENSE_MLP = (
    Entry(
        "blocks.{layer}.mlp.gate_up.weight",
        (
            Part(LAYER + "mlp.gate_proj.weight", mlp_rows),
            Part(LAYER + "mlp.up_proj.weight", mlp_rows),
        ),
    ),
    Entry("blocks.{layer}.mlp.down.weight", (Part(LAYER + "mlp.down_proj.weight"),)),
)
"""The gated MLP."""
