"""Rotary positions: their base, the share of a head that turns, and how they are stretched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.integration.config_resolved import ResolvedModel
from pcomm.integration.huggingface.config_table import Field, Together, refused

__all__ = ["PARTIAL_ROPE", "ROPE"]

_NAMES = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}
_LINEAR = {"rope_factor": "factor"}
# Which of our keys are which of their parameters, by the kind of scaling.
_KINDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", _LINEAR),
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

    return Together(_NAMES, read, write)


ROPE: Field = _rope(1.0, is_partial=False)
"""Rotary positions of whole heads."""

PARTIAL_ROPE: Field = _rope(0.25, is_partial=True)
"""Rotary positions of the first numbers of a head, by default a quarter."""
