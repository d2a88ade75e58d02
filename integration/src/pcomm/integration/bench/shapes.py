"""Shapes of the models that are measured, as fields of `config.json`. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Shape", "gated_delta_net", "llama", "mamba2"]


@dataclass(frozen=True)
class Shape:
    """A model that both transformers and pcomm build.

    Args:
        name: Name in the rows.
        family: `model_type` of its configuration.
        fields: Fields of its configuration.
    """

    name: str
    family: str
    fields: Mapping[str, Any]


def llama(
    name: str,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocabulary: int,
    longest: int,
) -> Shape:
    """A model of Llama's kind, whose head is its embedding.

    Args:
        name: Name in the rows.
        layers: Number of layers.
        width: Width of the residual stream, shared by the heads.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        mlp_width: Width between the matrices of the MLP.
        vocabulary: Number of token ids.
        longest: Most tokens of a sequence.
    """
    return Shape(name, "llama", _decoder(**_without_name(locals())))


def gated_delta_net(
    name: str,
    *,
    layers: int,
    width: int,
    heads: int,
    mlp_width: int,
    vocabulary: int,
    longest: int,
    attention_every: int | None = None,
) -> Shape:
    """Blocks of Qwen3-Next with dense MLPs: Gated DeltaNet, and attention in some if asked for.

    Args:
        name: Name in the rows.
        layers: Number of layers.
        width: Width of the residual stream, shared by the heads.
        heads: Number of heads of queries, keys and values.
        mlp_width: Width between the matrices of the MLP.
        vocabulary: Number of token ids.
        longest: Most tokens of a sequence.
        attention_every: Every which layer has attention; None for no layer.
    """
    decoder = _decoder(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        mlp_width=mlp_width,
        vocabulary=vocabulary,
        longest=longest,
    )
    head_dim = width // heads
    kinds = ["linear_attention"] * layers
    if attention_every is not None:
        kinds[attention_every - 1 :: attention_every] = ["full_attention"] * (
            layers // attention_every
        )
    own = {
        "layer_types": kinds,
        "mlp_only_layers": list(range(layers)),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }
    return Shape(name, "qwen3_next", decoder | own)


def mamba2(
    name: str,
    *,
    layers: int,
    width: int,
    heads: int,
    state: int,
    vocabulary: int,
    chunk: int,
) -> Shape:
    """A Mamba-2 model without MLPs.

    Args:
        name: Name in the rows.
        layers: Number of layers.
        width: Width of the residual stream; the inner one is twice that.
        heads: Number of heads.
        state: Width of a state.
        vocabulary: Number of token ids.
        chunk: Tokens that transformers computes together in a prompt. It has no other effect; in
            torch their memory grows with it, so a long prompt needs a small one.
    """
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "head_dim": 2 * width // heads,
        "expand": 2,
        "n_groups": 1,
        "state_size": state,
        "vocab_size": vocabulary,
        "chunk_size": chunk,
        "tie_word_embeddings": True,
    }
    return Shape(name, "mamba2", fields)


def _decoder(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocabulary: int,
    longest: int,
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "intermediate_size": mlp_width,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        "tie_word_embeddings": True,
    }


def _without_name(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != "name"}
