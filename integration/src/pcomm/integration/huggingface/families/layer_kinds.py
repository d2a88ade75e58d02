"""How many blocks there are, which mixer each has, and how wide a head is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcomm.integration.config_resolved import ResolvedModel
from pcomm.integration.huggingface.config_table import (
    Field,
    Fixed,
    Same,
    Together,
    count_of,
    refused,
)
from pcomm.integration.model_rules import mixers

__all__ = ["FULL_ATTENTION", "LAYERS", "LAYER_TYPES", "head_dim", "pattern_of"]

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

    return Together(("head_dim",), read, lambda model: {"head_dim": model.head_dim})


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


LAYER_TYPES: Field = Together(
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
    Together(("layer_types", "sliding_window", "max_window_layers"), _read_full, lambda model: {}),
)
"""Attention that sees all tokens before; a window that is not used may have any width."""
