"""What tables of Llama-like families share: tensors, experts, layer kinds, rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.integration.config.model_rules import expert_blocks, mixers
from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.huggingface.families.family import (
    Entry,
    Field,
    FieldGroup,
    Fixed,
    Part,
    Same,
    count_of,
    refused,
)

__all__ = [
    "ATTENTION",
    "DENSE_MLP",
    "EXPERT_FIELDS",
    "EXPERT_TENSORS",
    "FULL_ATTENTION",
    "HEAD_NORMS",
    "KV_HEADS",
    "LAYER",
    "LAYERS",
    "LAYER_TYPES",
    "NO_EFFECT_OF_EXPERTS",
    "PARTIAL_ROPE",
    "ROPE",
    "SHAPE",
    "STREAM",
    "head_dim",
    "kv_rows",
    "pattern_of",
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
        "blocks.{layer}.mixer.output.weight", (Part(LAYER + "self_attn.o_proj.weight"),), mixer="A"
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


def _rows(config: ResolvedModel) -> int:
    return config.expert_width


def _count(their: Mapping[str, Any]) -> int:
    """The number of experts, by its name in configurations or by that in transformers."""
    name = "num_experts" if "num_experts" in their else "num_local_experts"
    return count_of(their, name, least=0)


def _read_places(their: Mapping[str, Any]) -> dict[str, Any]:
    """Which blocks have experts: every n-th, where `mlp_only_layers` says nothing else."""
    layers, experts = count_of(their, "num_hidden_layers"), _count(their)
    every, dense = count_of(their, "decoder_sparse_step", 1), their.get("mlp_only_layers") or []
    found = [(n + 1) % every == 0 and n not in dense for n in range(layers)]
    if not experts or not any(found):
        return {"experts": 0}
    for step in range(1, layers + 1):
        if found == [(n + 1) % step == 0 for n in range(layers)]:
            return {"experts": experts, "moe_every": step}
    raise refused("mlp_only_layers", dense, "a model in which every n-th block has experts")


def _write_places(model: ResolvedModel) -> dict[str, Any]:
    has_any = any(expert_blocks(model))
    return {
        "num_experts": model.experts if has_any else 0,
        "decoder_sparse_step": model.moe_every if has_any else 1,
        "mlp_only_layers": [],
    }


def _read_weights(their: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    is_normalised = their.get("norm_topk_prob", False)
    if not isinstance(is_normalised, bool):
        raise refused("norm_topk_prob", is_normalised, "true or false")
    return {
        "experts_per_token": count_of(their, "num_experts_per_tok"),
        "expert_weights": "normalised" if is_normalised else "probability",
    }


def _write_weights(model: ResolvedModel) -> dict[str, Any]:
    kind, count = model.expert_weights, model.experts_per_token
    is_normalised = count > 1 if kind == "auto" else kind == "normalised"
    return {"num_experts_per_tok": count, "norm_topk_prob": is_normalised}


EXPERT_FIELDS: tuple[Field, ...] = (
    Same("moe_intermediate_size", "expert_width"),
    FieldGroup(
        ("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
        _read_places,
        _write_places,
    ),
    FieldGroup(("num_experts_per_tok", "norm_topk_prob"), _read_weights, _write_weights),
)
"""Number, width and places of the experts."""

EXPERT_TENSORS = (
    Entry("blocks.{layer}.mlp.router.weight", (Part(LAYER + "mlp.gate.weight"),)),
    Entry(
        "blocks.{layer}.mlp.experts.gate_up",
        (
            Part(LAYER + "mlp.experts.{expert}.gate_proj.weight", _rows),
            Part(LAYER + "mlp.experts.{expert}.up_proj.weight", _rows),
        ),
    ),
    Entry(
        "blocks.{layer}.mlp.experts.down", (Part(LAYER + "mlp.experts.{expert}.down_proj.weight"),)
    ),
)
"""Router and experts, which lie in a file one by one."""

NO_EFFECT_OF_EXPERTS = ("router_aux_loss_coef", "output_router_logits")
"""Fields that training alone looks at."""


_FULL, _LINEAR = "full_attention", "linear_attention"


def pattern_of(letters: str) -> str:
    """The shortest pattern that, repeated as a whole, gives the letter of each block."""
    for length in range(1, len(letters)):
        if len(letters) % length == 0 and letters == letters[:length] * (len(letters) // length):
            return letters[:length]
    return letters


def head_dim(absent: int | None) -> Field:
    """The width of a head.

    Args:
        absent: Width where the field is absent; None for the width shared by the heads.
    """

    def read(their: Mapping[str, Any]) -> dict[str, Any]:
        derived = absent
        if derived is None:
            derived = count_of(their, "hidden_size") // count_of(their, "num_attention_heads")
        return {"head_dim": count_of(their, "head_dim", derived)}

    return FieldGroup(("head_dim",), read, lambda model: {"head_dim": model.head_dim})


LAYERS: Field = Same("num_hidden_layers", "layers")
"""The number of blocks, all of one kind."""


def _read_types(their: Mapping[str, Any]) -> dict[str, Any]:
    layers, types = count_of(their, "num_hidden_layers"), their.get("layer_types")
    every = count_of(their, "full_attention_interval", 4)
    if types is None:
        types = [_LINEAR if (n + 1) % every else _FULL for n in range(layers)]
    known = {_FULL: "A", _LINEAR: "G"}
    if not isinstance(types, list) or len(types) != layers or not set(types) <= known.keys():
        raise refused(
            "layer_types", types, f"{_FULL!r} or {_LINEAR!r} for each of the {layers} layers"
        )
    return {"layers": layers, "pattern": pattern_of("".join(known[kind] for kind in types))}


def _write_types(model: ResolvedModel) -> dict[str, Any]:
    kinds = {"A": _FULL, "G": _LINEAR, "M": "mamba"}
    return {
        "num_hidden_layers": model.layers,
        "layer_types": [kinds[letter] for letter in mixers(model)],
    }


LAYER_TYPES: Field = FieldGroup(
    ("num_hidden_layers", "layer_types", "full_attention_interval"), _read_types, _write_types
)
"""The kind of each block: attention or Gated DeltaNet."""


def _read_full(their: Mapping[str, Any]) -> dict[str, Any]:
    types = their.get("layer_types")
    if types is not None and set(types) != {_FULL}:
        raise refused("layer_types", types, f"{_FULL!r} in every layer")
    return {}


FULL_ATTENTION: tuple[Field, ...] = (
    Fixed("use_sliding_window", False),
    FieldGroup(
        ("layer_types", "sliding_window", "max_window_layers"), _read_full, lambda model: {}
    ),
)
"""Attention that sees all tokens before; a window that is not used may have any width."""


_NAMES = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}
_LINEAR_ROPE = {"rope_factor": "factor"}
# Which of our keys are which of their parameters, by the kind of scaling.
_KINDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", _LINEAR_ROPE),
    "llama3": ("llama3", _LLAMA3),
}


def _rope(absent_fraction: float, *, is_partial: bool) -> Field:
    """The field of a family.

    Args:
        absent_fraction: Share of a head that turns where the configuration does not say it.
        is_partial: True if the family has models in which a part of a head turns.
    """

    def read(their: Mapping[str, Any]) -> dict[str, Any]:
        # Files of transformers 4 have rope_scaling beside rope_theta, later ones rope_parameters.
        given = their.get("rope_scaling") or their.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise refused("rope_scaling", given, "a JSON object")
        params = {key: value for key, value in given.items() if value is not None}
        kind = params.pop("rope_type", params.pop("type", "default"))
        params.pop("type", None)
        theta = params.pop("rope_theta", their.get("rope_theta") or 10_000.0)
        fraction = params.pop("partial_rotary_factor", their.get("partial_rotary_factor"))
        fraction = absent_fraction if fraction is None else fraction
        if fraction != 1 and not is_partial:
            raise refused("partial_rotary_factor", fraction, "1.0 in this family")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise refused("rope_type", kind, ", ".join(map(repr, _KINDS)))
        ours, names = _KINDS[kind]
        if "original_max_position_embeddings" in names.values():
            context = their.get("max_position_embeddings")
            params.setdefault("original_max_position_embeddings", context)
        if unknown := sorted(params.keys() - names.values() - {"original_max_position_embeddings"}):
            raise refused(f"rope_scaling: {unknown[0]}", params[unknown[0]], "none with " + kind)
        if missing := sorted(name for name in names.values() if params.get(name) is None):
            raise ConfigError(
                f"config.json: rope_scaling: {missing[0]}",
                found="no such field",
                why=f"The kind {kind!r} cannot be computed without it.",
                fix="Copy config.json again from where the directory came from.",
            )
        found = {key: params[name] for key, name in names.items()}
        return {"rope_theta": theta, "rotary_fraction": fraction, "rope_scaling": ours, **found}

    def write(model: ResolvedModel) -> dict[str, Any]:
        kind, names = next((k, n) for k, (ours, n) in _KINDS.items() if ours == model.rope_scaling)
        scaling = {name: getattr(model, key) for key, name in names.items()}
        fields: dict[str, Any] = {"rope_theta": model.rope_theta}
        if scaling:
            fields["rope_scaling"] = {"rope_type": kind, **scaling}
        if is_partial:
            fields["partial_rotary_factor"] = model.rotary_fraction
        return fields

    return FieldGroup(_NAMES, read, write)


ROPE: Field = _rope(1.0, is_partial=False)
"""Rotary positions of whole heads."""

PARTIAL_ROPE: Field = _rope(0.25, is_partial=True)
"""Rotary positions of the first numbers of a head, by default a quarter."""
