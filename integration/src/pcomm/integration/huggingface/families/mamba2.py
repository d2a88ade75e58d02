"""Mamba-2: blocks of one mixer, without an MLP."""

from __future__ import annotations

import math
from typing import Any

from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.huggingface.families.family import (
    Family,
    FieldGroup,
    Values,
    count_of,
    damaged,
    refused,
)

__all__ = ["MAMBA2"]


def _check_inner(their: Values) -> dict[str, Any]:
    heads = count_of(their, "num_heads", 128) * count_of(their, "head_dim", 64)
    inner = count_of(their, "hidden_size", 4096) * count_of(their, "expand", 2)
    if heads != inner:
        found = f"expand x hidden_size = {inner}, and num_heads x head_dim = {heads}"
        raise damaged("expand", found, "Both are the inner width of a block.")
    return {}


def _write_inner(model: ResolvedModel) -> dict[str, Any]:
    # Their inner width is a whole multiple of the stream's; another one is no model of theirs, and
    # reads back as an error.
    return {"expand": max(1, model.mamba_heads * model.mamba_head_dim // model.width)}


def _read_limits(their: Values) -> dict[str, Any]:
    limits = their.get("time_step_limit") or (0.0, math.inf)
    if len(limits) != 2:
        raise refused("time_step_limit", limits, "two numbers")
    low, high = limits
    longest = "none" if high == math.inf else high
    return {"mamba_min_time_step": low, "mamba_max_time_step": longest}


def _write_limits(model: ResolvedModel) -> dict[str, Any]:
    high = model.mamba_max_time_step
    return {"time_step_limit": [model.mamba_min_time_step, math.inf if high == "none" else high]}


MAMBA2 = Family(
    model_type="mamba2",
    same={
        "hidden_size": ("width", 4096),
        "num_hidden_layers": ("layers", None),
        "num_heads": ("mamba_heads", 128),
        "head_dim": ("mamba_head_dim", 64),
        "state_size": ("mamba_state_dim", 128),
        "n_groups": ("mamba_groups", 8),
        "conv_kernel": ("conv_width", 4),
        "use_conv_bias": ("mamba_conv_bias", True),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tie_embeddings", False),
    },
    fixed={"hidden_act": "silu", "use_bias": False},
    groups=(
        FieldGroup(("expand",), _check_inner, _write_inner),
        FieldGroup(("time_step_limit",), _read_limits, _write_limits),
    ),
    # No block has attention: one head, so that its width is sound whatever the stream's is.
    keys={"pattern": "M", "mlp_width": "none", "heads": 1},
    tensors={
        "embedding.weight": "backbone.embeddings.weight",
        "norm.weight": "backbone.norm_f.weight",
        "head.weight": "lm_head.weight",
        "mixer_norm.weight": "norm.weight",
        # Gate, input, B, C and time steps stand in the same order.
        "M.input.weight": "mixer.in_proj.weight",
        "M.output.weight": "mixer.out_proj.weight",
        "M.conv_weight": "mixer.conv1d.weight",
        "M.conv_bias": "mixer.conv1d.bias",
        "M.a_log": "mixer.A_log",
        "M.dt_bias": "mixer.dt_bias",
        "M.d": "mixer.D",
        "M.norm_weight": "mixer.norm.weight",
    },
    block="backbone.layers.{layer}.",
    ignored_fields=(
        "chunk_size",
        # Written by models whose blocks nevertheless gate first, as transformers computes all.
        "norm_before_gate",
        *("fused_add_norm", "pad_vocab_size_multiple", "residual_in_fp32"),
        *("rescale_prenorm_residual", "time_step_floor", "time_step_init_scheme"),
        *("time_step_max", "time_step_min", "time_step_rank", "time_step_scale"),
    ),
)
