"""Qwen3-Next: three blocks of Gated DeltaNet, one of gated attention, and experts."""

from __future__ import annotations

from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.huggingface.families.decoder import (
    DENSE_MLP,
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    HEAD_NORMS,
    KV_HEADS,
    LAYER,
    LAYER_TYPES,
    NO_EFFECT_OF_EXPERTS,
    PARTIAL_ROPE,
    SHAPE,
    STREAM,
    head_dim,
    kv_rows,
)
from pcomm.integration.huggingface.families.family import Entry, Family, Fixed, Part, Same

__all__ = ["QWEN3_NEXT"]


def _head(config: ResolvedModel) -> int:
    return config.head_dim


def _heads(config: ResolvedModel) -> int:
    return config.heads


def _two_heads(config: ResolvedModel) -> int:
    return 2 * config.head_dim


_ATTENTION = (
    Entry(
        "blocks.{layer}.mixer.qkv.weight",
        (
            # Queries and gates of one head lie next to each other.
            Part(LAYER + "self_attn.q_proj.weight", _head, _heads, stride=_two_heads),
            Part(LAYER + "self_attn.k_proj.weight", kv_rows),
            Part(LAYER + "self_attn.v_proj.weight", kv_rows),
            Part(LAYER + "self_attn.q_proj.weight", _head, _heads, _head, stride=_two_heads),
        ),
        mixer="A",
    ),
    Entry(
        "blocks.{layer}.mixer.output.weight", (Part(LAYER + "self_attn.o_proj.weight"),), mixer="A"
    ),
)


def _key_heads(config: ResolvedModel) -> int:
    return config.gdn_key_heads


def _key_rows(config: ResolvedModel) -> int:
    return config.gdn_key_dim


def _shared(config: ResolvedModel) -> int:
    """Value heads that one key head serves."""
    return config.gdn_value_heads // config.gdn_key_heads


def _value_rows(config: ResolvedModel) -> int:
    return _shared(config) * config.gdn_value_dim


def _qkvz_rows(config: ResolvedModel) -> int:
    return 2 * _key_rows(config) + 2 * _value_rows(config)


_QKVZ, _BA = LAYER + "linear_attn.in_proj_qkvz.weight", LAYER + "linear_attn.in_proj_ba.weight"


def _delta(ours: str, theirs: str, middle: int = 0) -> Entry:
    part = Part(f"{LAYER}linear_attn.{theirs}")
    return Entry(f"blocks.{{layer}}.mixer.{ours}", (part,), mixer="G", middle=middle)


_GATED_DELTA_NET = (
    Entry(
        "blocks.{layer}.mixer.input.weight",
        (
            # Theirs has queries, keys, values and gates of one key head after the other.
            Part(_QKVZ, _key_rows, _key_heads, stride=_qkvz_rows),
            Part(_QKVZ, _key_rows, _key_heads, _key_rows, stride=_qkvz_rows),
            Part(_QKVZ, _value_rows, _key_heads, lambda c: 2 * _key_rows(c), stride=_qkvz_rows),
            Part(
                _QKVZ,
                _value_rows,
                _key_heads,
                lambda c: 2 * _key_rows(c) + _value_rows(c),
                stride=_qkvz_rows,
            ),
            Part(_BA, _shared, _key_heads, stride=lambda c: 2 * _shared(c)),
            Part(_BA, _shared, _key_heads, _shared, stride=lambda c: 2 * _shared(c)),
        ),
        mixer="G",
    ),
    _delta("output.weight", "out_proj.weight"),
    _delta("conv_weight", "conv1d.weight", middle=1),
    _delta("a_log", "A_log"),
    _delta("dt_bias", "dt_bias"),
    _delta("norm_weight", "norm.weight"),
)


def _shared_rows(config: ResolvedModel) -> int:
    return config.shared_expert_width


_SHARED_EXPERT = (
    Entry(
        "blocks.{layer}.mlp.shared.gate_up.weight",
        (
            Part(LAYER + "mlp.shared_expert.gate_proj.weight", _shared_rows),
            Part(LAYER + "mlp.shared_expert.up_proj.weight", _shared_rows),
        ),
    ),
    Entry(
        "blocks.{layer}.mlp.shared.down.weight",
        (Part(LAYER + "mlp.shared_expert.down_proj.weight"),),
    ),
    Entry("blocks.{layer}.mlp.shared_gate", (Part(LAYER + "mlp.shared_expert_gate.weight"),)),
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=(
        *SHAPE,
        KV_HEADS,
        PARTIAL_ROPE,
        LAYER_TYPES,
        head_dim(256),
        *EXPERT_FIELDS,
        Same("linear_conv_kernel_dim", "conv_width", default=4),
        Same("linear_key_head_dim", "gdn_key_dim", default=128),
        Same("linear_value_head_dim", "gdn_value_dim", default=128),
        Same("linear_num_key_heads", "gdn_key_heads", default=16),
        Same("linear_num_value_heads", "gdn_value_heads", default=32),
        Same("shared_expert_intermediate_size", "shared_expert_width"),
        Fixed("attention_bias", False),
        Fixed("use_sliding_window", False),
    ),
    keys={
        "qk_norm": True,
        "attention_gate": True,
        "shared_expert_gate": True,
        "norm_zero_centred": True,
    },
    tensors=(
        *STREAM,
        *_ATTENTION,
        *HEAD_NORMS,
        *_GATED_DELTA_NET,
        *DENSE_MLP,
        *EXPERT_TENSORS,
        *_SHARED_EXPERT,
    ),
    # The weights of a head that guesses more tokens ahead, which transformers leaves out, too.
    ignored=(r"mtp\..*",),
    ignored_fields=NO_EFFECT_OF_EXPERTS,
)
