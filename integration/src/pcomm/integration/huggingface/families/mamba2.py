"""Mamba-2: blocks of one mixer, without an MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.huggingface.families.decoder import LAYERS
from pcomm.integration.huggingface.families.family import (
    Entry,
    Family,
    Field,
    FieldGroup,
    Fixed,
    Part,
    Same,
    count_of,
    refused,
)

__all__ = ["MAMBA2"]

_LAYER = "backbone.layers.{layer}."


def _read_heads(their: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = count_of(their, "num_heads", 128), count_of(their, "head_dim", 64)
    inner = count_of(their, "hidden_size", 4096) * count_of(their, "expand", 2)
    if heads * width != inner:
        raise ConfigError(
            "config.json: expand",
            found=f"expand x hidden_size = {inner}, and num_heads x head_dim = {heads * width}",
            why="Both are the inner width of a block.",
            fix="Copy config.json again from where the directory came from.",
        )
    return {"mamba_heads": heads, "mamba_head_dim": width}


def _write_heads(model: ResolvedModel) -> dict[str, Any]:
    inner = model.mamba_heads * model.mamba_head_dim
    # Their inner width is a whole multiple of the stream's; another one is no model of theirs, and
    # reads back as an error.
    return {
        "num_heads": model.mamba_heads,
        "head_dim": model.mamba_head_dim,
        "expand": max(1, inner // model.width),
    }


def _read_limits(their: Mapping[str, Any]) -> dict[str, Any]:
    limits = their.get("time_step_limit") or (0.0, math.inf)
    if len(limits) != 2:
        raise refused("time_step_limit", limits, "two numbers")
    low, high = limits
    longest = "none" if high == math.inf else high
    return {"mamba_min_time_step": low, "mamba_max_time_step": longest}


def _write_limits(model: ResolvedModel) -> dict[str, Any]:
    high = model.mamba_max_time_step
    return {"time_step_limit": [model.mamba_min_time_step, math.inf if high == "none" else high]}


_FIELDS: tuple[Field, ...] = (
    Same("hidden_size", "width", default=4096),
    Same("state_size", "mamba_state_dim", default=128),
    Same("n_groups", "mamba_groups", default=8),
    Same("conv_kernel", "conv_width", default=4),
    Same("layer_norm_epsilon", "norm_eps", default=1e-5),
    Same("tie_word_embeddings", "tie_embeddings", default=False),
    FieldGroup(("num_heads", "head_dim", "expand"), _read_heads, _write_heads),
    LAYERS,
    Fixed("hidden_act", "silu"),
    Fixed("use_bias", False),
    Same("use_conv_bias", "mamba_conv_bias", default=True),
    FieldGroup(("time_step_limit",), _read_limits, _write_limits),
    Fixed("rms_norm", True, is_written=False),
)


def _mixer(ours: str, theirs: str, middle: int = 0) -> Entry:
    return Entry(f"blocks.{{layer}}.{ours}", (Part(_LAYER + theirs),), mixer="M", middle=middle)


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    fields=_FIELDS,
    # No block has attention: one head, so that its width is sound whatever the stream's is.
    keys={"pattern": "M", "mlp_width": "none", "heads": 1},
    tensors=(
        Entry("embedding.weight", (Part("backbone.embeddings.weight"),)),
        Entry("norm.weight", (Part("backbone.norm_f.weight"),)),
        Entry("head.weight", (Part("lm_head.weight"),)),
        _mixer("mixer_norm.weight", "norm.weight"),
        # Gate, input, B, C and time steps stand in the same order.
        _mixer("mixer.input.weight", "mixer.in_proj.weight"),
        _mixer("mixer.output.weight", "mixer.out_proj.weight"),
        _mixer("mixer.conv_weight", "mixer.conv1d.weight", middle=1),
        _mixer("mixer.conv_bias", "mixer.conv1d.bias"),
        _mixer("mixer.a_log", "mixer.A_log"),
        _mixer("mixer.dt_bias", "mixer.dt_bias"),
        _mixer("mixer.d", "mixer.D"),
        _mixer("mixer.norm_weight", "mixer.norm.weight"),
    ),
    ignored_fields=(
        "chunk_size",
        # Written by models whose blocks nevertheless gate first, as transformers computes all.
        "norm_before_gate",
        "fused_add_norm",
        "pad_vocab_size_multiple",
        "residual_in_fp32",
        "rescale_prenorm_residual",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "time_step_scale",
    ),
)
