"""Llama, Qwen2, Qwen3, Qwen3-MoE and Qwen3-Next, which are Llama and what differs from it."""

from __future__ import annotations

from collections.abc import Mapping

from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.huggingface.families.family import Family, Part, Source
from pcomm.integration.huggingface.families.fields import EXPERTS, layer_types, rope

__all__ = ["LLAMA", "QWEN2", "QWEN3", "QWEN3_MOE", "QWEN3_NEXT"]

_SHAPE: Mapping[str, tuple[str, int | float | bool | str | None]] = {
    "hidden_size": ("width", None),
    "num_hidden_layers": ("layers", None),
    "num_attention_heads": ("heads", None),
    # The number of an absent field differs from that of the heads, but in Llama.
    "num_key_value_heads": ("kv_heads", None),
    "head_dim": ("head_dim", "auto"),
    "intermediate_size": ("mlp_width", None),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_embeddings", False),
}
_EXPERTS_SHAPE = {
    "moe_intermediate_size": ("expert_width", None),
    "num_experts_per_tok": ("experts_per_token", None),
}
_NO_WINDOW = {"hidden_act": "silu", "use_sliding_window": False}


def _of_heads(kind: str) -> Source:
    """Queries, keys and values one after the other."""

    def parts(c: ResolvedModel) -> tuple[Part, ...]:
        rows = {
            "q": c.heads * c.head_dim,
            "k": c.kv_heads * c.head_dim,
            "v": c.kv_heads * c.head_dim,
        }
        return tuple(Part(f"self_attn.{x}_proj.{kind}", count) for x, count in rows.items())

    return parts


_STREAM: Mapping[str, Source] = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "mixer_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": "mlp.down_proj.weight",
    "A.qkv.weight": _of_heads("weight"),
    "A.output.weight": "self_attn.o_proj.weight",
}
_HEAD_NORMS: Mapping[str, Source] = {
    "A.q_norm.weight": "self_attn.q_norm.weight",
    "A.k_norm.weight": "self_attn.k_norm.weight",
}
_EXPERTS: Mapping[str, Source] = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.gate_up": (
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    "mlp.experts.down": "mlp.experts.{expert}.down_proj.weight",
}

LLAMA = Family(
    model_type="llama",
    same={**_SHAPE, "num_key_value_heads": ("kv_heads", "auto")},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    groups=(rope(1.0),),
    tensors=_STREAM,
    # Files of earlier versions hold the angles.
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    ignored_fields=("pretraining_tp", "is_llama_config", "is_custom_code", "mlp_dropout"),
)

QWEN2 = Family(
    model_type="qwen2",
    same=_SHAPE,
    fixed=_NO_WINDOW,
    groups=(rope(1.0), layer_types(1)),
    keys={"qkv_bias": True},
    tensors={**_STREAM, "A.qkv.bias": _of_heads("bias")},
    # A window that is not used may have any width.
    ignored_fields=("sliding_window",),
)

QWEN3 = Family(
    model_type="qwen3",
    same={**_SHAPE, "head_dim": ("head_dim", 128)},
    fixed={**_NO_WINDOW, "attention_bias": False},
    groups=(rope(1.0), layer_types(1)),
    keys={"qk_norm": True},
    tensors={**_STREAM, **_HEAD_NORMS},
    ignored_fields=("sliding_window",),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    same={**_SHAPE, **_EXPERTS_SHAPE},
    fixed=QWEN3.fixed,
    groups=(*QWEN3.groups, EXPERTS),
    keys=QWEN3.keys,
    tensors={**QWEN3.tensors, **_EXPERTS},
    ignored_fields=("sliding_window",),
)


def _gated_attention(c: ResolvedModel) -> tuple[Part, ...]:
    # Queries and gates of one head lie next to each other.
    queries = Part("self_attn.q_proj.weight", c.head_dim, c.heads)
    keys, values = (Part(f"self_attn.{x}_proj.weight", c.kv_heads * c.head_dim) for x in "kv")
    return (queries, keys, values, queries)


def _delta_net_inputs(c: ResolvedModel) -> tuple[Part, ...]:
    # Theirs has queries, keys, values and gates of one key head after the other.
    heads, shared = c.gdn_key_heads, c.gdn_value_heads // c.gdn_key_heads
    keys = Part("linear_attn.in_proj_qkvz.weight", c.gdn_key_dim, heads)
    values = keys._replace(rows=shared * c.gdn_value_dim)
    rates = Part("linear_attn.in_proj_ba.weight", shared, heads)
    return (keys, keys, values, values, rates, rates)


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    same={
        **QWEN3_MOE.same,
        "head_dim": ("head_dim", 256),
        "linear_conv_kernel_dim": ("conv_width", 4),
        "linear_key_head_dim": ("gdn_key_dim", 128),
        "linear_value_head_dim": ("gdn_value_dim", 128),
        "linear_num_key_heads": ("gdn_key_heads", 16),
        "linear_num_value_heads": ("gdn_value_heads", 32),
        "shared_expert_intermediate_size": ("shared_expert_width", None),
    },
    fixed=QWEN3.fixed,
    groups=(rope(0.25), layer_types(4), EXPERTS),
    keys={
        "qk_norm": True,
        "attention_gate": True,
        "shared_expert_gate": True,
        "norm_zero_centred": True,
    },
    tensors={
        **QWEN3_MOE.tensors,
        "A.qkv.weight": _gated_attention,
        "G.input.weight": _delta_net_inputs,
        "G.output.weight": "linear_attn.out_proj.weight",
        "G.conv_weight": "linear_attn.conv1d.weight",
        "G.a_log": "linear_attn.A_log",
        "G.dt_bias": "linear_attn.dt_bias",
        "G.norm_weight": "linear_attn.norm.weight",
        "mlp.shared.gate_up.weight": (
            "mlp.shared_expert.gate_proj.weight",
            "mlp.shared_expert.up_proj.weight",
        ),
        "mlp.shared.down.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_gate": "mlp.shared_expert_gate.weight",
    },
    # The weights of a head that guesses more tokens ahead, which transformers leaves out, too.
    ignored=(r"mtp\..*",),
)
