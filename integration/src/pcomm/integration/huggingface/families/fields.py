"""Fields of `config.json` that families share and that are no key of ours by another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcomm.integration.config.model_rules import expert_blocks, mixers
from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.huggingface.families.family import (
    FieldGroup,
    Values,
    count_of,
    damaged,
    refused,
)

__all__ = ["EXPERTS", "SCALINGS", "layer_types", "normalises", "pattern_of", "rope"]


# -- experts ---------------------------------------------------------------------------------


def normalises(model: ResolvedModel) -> bool:
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    kind = model.expert_weights
    return model.experts_per_token > 1 if kind == "auto" else kind == "normalised"


def _read_experts(their: Values) -> dict[str, Any]:
    is_normalised = their.get("norm_topk_prob", False)
    if not isinstance(is_normalised, bool):
        raise refused("norm_topk_prob", is_normalised, "true or false")
    ours = {"expert_weights": "normalised" if is_normalised else "probability"}
    # By its name in configurations or by that in transformers.
    name = "num_experts" if "num_experts" in their else "num_local_experts"
    layers, experts = count_of(their, "num_hidden_layers"), count_of(their, name, least=0)
    every, dense = count_of(their, "decoder_sparse_step", 1), their.get("mlp_only_layers") or []
    found = [(n + 1) % every == 0 and n not in dense for n in range(layers)]
    if not experts or not any(found):
        return {**ours, "experts": 0}
    for step in range(1, layers + 1):
        if found == [(n + 1) % step == 0 for n in range(layers)]:
            return {**ours, "experts": experts, "moe_every": step}
    raise refused("mlp_only_layers", dense, "a model in which every n-th block has experts")


def _write_experts(model: ResolvedModel) -> dict[str, Any]:
    has_any = any(expert_blocks(model))
    return {
        "num_experts": model.experts if has_any else 0,
        "decoder_sparse_step": model.moe_every if has_any else 1,
        "mlp_only_layers": [],
        "norm_topk_prob": normalises(model),
    }


EXPERTS = FieldGroup(
    (
        *("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
        "norm_topk_prob",
    ),
    _read_experts,
    _write_experts,
)
"""Number, places and weights of the experts."""


# -- kinds of blocks -------------------------------------------------------------------------


def pattern_of(letters: str) -> str:
    """The shortest pattern that, repeated as a whole, gives the letter of each block."""
    for length in range(1, len(letters)):
        if len(letters) % length == 0 and letters == letters[:length] * (len(letters) // length):
            return letters[:length]
    return letters


def layer_types(interval: int) -> FieldGroup:
    """The kind of each block: attention or Gated DeltaNet.

    Args:
        interval: Every how many blocks have attention where the configuration does not say it; 1
            for a family in which all have.
    """
    known = {"full_attention": "A"} | ({"linear_attention": "G"} if interval > 1 else {})

    def read(their: Values) -> dict[str, Any]:
        layers, types = count_of(their, "num_hidden_layers"), their.get("layer_types")
        if types is None:
            every = count_of(their, "full_attention_interval", interval)
            letters = ["G" if (n + 1) % every else "A" for n in range(layers)]
            return {"pattern": pattern_of("".join(letters))}
        if not isinstance(types, list) or len(types) != layers or not set(types) <= known.keys():
            raise refused("layer_types", types, f"{list(known)} for each of the {layers} layers")
        return {"pattern": pattern_of("".join(known[kind] for kind in types))}

    if interval == 1:
        return FieldGroup(("layer_types",), read, lambda model: {})

    def write(model: ResolvedModel) -> dict[str, Any]:
        kinds = {letter: kind for kind, letter in known.items()}
        # A mixer that the family has not stays a letter, which `read` refuses.
        return {"layer_types": [kinds.get(letter, letter) for letter in mixers(model)]}

    return FieldGroup(("layer_types", "full_attention_interval"), read, write)


# -- rotary positions ------------------------------------------------------------------------

_CONTEXT = "original_max_position_embeddings"
_KINDS = {"default": "none", "linear": "linear", "llama3": "llama3"}
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"rope_factor": "factor"},
    "llama3": {
        "rope_factor": "factor",
        "rope_low_frequency": "low_freq_factor",
        "rope_high_frequency": "high_freq_factor",
        "rope_original_context": _CONTEXT,
    },
}
"""Which of our keys are which of their parameters, by `model.rope_scaling`."""


def rope(absent: float) -> FieldGroup:
    """Rotary positions.

    Args:
        absent: Share of a head that turns where the configuration does not say it; 1 for a family
            in which all of it does.
    """

    def read(their: Values) -> dict[str, Any]:
        # Files of transformers 4 have rope_scaling beside rope_theta, later ones rope_parameters.
        given = their.get("rope_scaling") or their.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise refused("rope_scaling", given, "a JSON object")
        params = {key: value for key, value in given.items() if value is not None}
        kind = params.pop("rope_type", params.pop("type", "default"))
        theta = params.pop("rope_theta", their.get("rope_theta") or 10_000.0)
        fraction = params.pop("partial_rotary_factor", their.get("partial_rotary_factor"))
        fraction = absent if fraction is None else fraction
        if absent == 1 and fraction != 1:
            raise refused("partial_rotary_factor", fraction, "1.0 in this family")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise refused("rope_type", kind, ", ".join(map(repr, _KINDS)))
        names = SCALINGS[_KINDS[kind]]
        params.setdefault(_CONTEXT, their.get("max_position_embeddings"))
        if unknown := sorted(params.keys() - names.values() - {_CONTEXT}):
            raise refused(f"rope_scaling: {unknown[0]}", params[unknown[0]], "none with " + kind)
        if missing := sorted(name for name in names.values() if params.get(name) is None):
            why = f"The kind {kind!r} cannot be computed without it."
            raise damaged(f"rope_scaling: {missing[0]}", "no such field", why)
        found = {key: params[name] for key, name in names.items()}
        return {
            "rope_theta": theta,
            "rotary_fraction": fraction,
            "rope_scaling": _KINDS[kind],
            **found,
        }

    def write(model: ResolvedModel) -> dict[str, Any]:
        kind, names = model.rope_scaling, SCALINGS[model.rope_scaling]
        scaling = {name: getattr(model, key) for key, name in names.items()}
        fields: dict[str, Any] = {"rope_theta": model.rope_theta}
        if scaling:
            fields["rope_scaling"] = {"rope_type": kind, **scaling}
        if absent != 1:
            fields["partial_rotary_factor"] = model.rotary_fraction
        return fields

    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return FieldGroup(names, read, write)
