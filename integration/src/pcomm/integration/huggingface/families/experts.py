"""What the families with experts have in common, as Qwen's name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcomm.integration.config_resolved import ResolvedModel
from pcomm.integration.huggingface.config_table import Field, Same, Together, count_of, refused
from pcomm.integration.huggingface.families.decoder import LAYER
from pcomm.integration.huggingface.tensor_table import Entry, Part
from pcomm.integration.model_rules import expert_blocks

__all__ = ["EXPERT_FIELDS", "EXPERT_TENSORS", "NO_EFFECT_OF_EXPERTS"]


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
    Together(
        ("num_experts", "num_local_experts", "decoder_sparse_step", "mlp_only_layers"),
        _read_places,
        _write_places,
    ),
    Together(("num_experts_per_tok", "norm_topk_prob"), _read_weights, _write_weights),
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
        "blocks.{layer}.mlp.experts.down",
        (Part(LAYER + "mlp.experts.{expert}.down_proj.weight"),),
    ),
)
"""Router and experts, which lie in a file one by one."""

NO_EFFECT_OF_EXPERTS = ("router_aux_loss_coef", "output_router_logits")
"""Fields that training alone looks at."""
