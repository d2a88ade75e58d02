"""Fields of `config.json`: used, of one supported value, or without effect; others are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from integration_support.huggingface_directories import SMALL_CONFIGS
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration.config.model_rules import resolve_model
from pcomm.integration.config.sections import ModelConfig
from pcomm.integration.huggingface import open_directory, read_model, write_config
from pcomm.integration.huggingface.config_json import effective
from pcomm.integration.huggingface.families import FAMILIES
from pcomm.integration.huggingface.families.fields import pattern_of

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")


def fields_of(family: str, **changes: Any) -> dict[str, Any]:
    """What transformers writes for a small model."""
    config = transformers.AutoConfig.for_model(family, **{**SMALL_CONFIGS[family], **changes})
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written


def read(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model(open_directory(folder, has_weights=False)).config


@pytest.mark.parametrize("family", SMALL_CONFIGS)
def test_every_field_that_transformers_writes_is_known(family, tmp_path):
    """With all defaults written out; a field of a later version would be refused here."""
    full, short = fields_of(family), dict(SMALL_CONFIGS[family], model_type=family)
    from_full, from_short = (resolve_model(read(tmp_path, fields)) for fields in (full, short))
    assert effective(from_full) == effective(from_short)


@pytest.mark.parametrize("family", SMALL_CONFIGS)
def test_a_changed_number_is_noticed_or_has_no_effect(family, tmp_path):
    """Each number and switch of theirs, moved: our keys change, or it is refused, or listed."""
    full = fields_of(family)
    before = effective(resolve_model(read(tmp_path, full)))
    unnoticed = set()
    for name, value in full.items():
        if isinstance(value, bool):
            other: Any = not value
        elif isinstance(value, int | float):
            other = value * 2
        else:
            continue
        try:
            after = effective(resolve_model(read(tmp_path, {**full, name: other})))
        except (ConfigError, UnsupportedError) as error:
            assert "config.json" in str(error) or "model." in str(error)  # noqa: PT017
            continue
        if after == before:
            unnoticed.add(name)
    if family == "qwen3_next":
        # All of its blocks have experts, so no MLP has this width.
        unnoticed -= {"intermediate_size"}
    # All of these say how a model is trained, how long its texts are, or how text is written.
    assert unnoticed <= {
        *("attention_dropout", "bos_token_id", "chunk_size", "chunk_size_feed_forward"),
        *("eos_token_id", "initializer_range", "max_position_embeddings", "max_window_layers"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id"),
        *("pretraining_tp", "residual_in_fp32", "rescale_prenorm_residual", "return_dict"),
        *("router_aux_loss_coef", "sliding_window", "time_step_floor", "time_step_max"),
        *("time_step_min", "time_step_rank", "use_cache", "vocab_size"),
    }


PUBLISHED = {
    "llama": "pretraining_tp is_llama_config rope_interleaved transformers.js_config rope_scaling",
    "qwen2": "max_window_layers sliding_window use_mrope rope_scaling torch_dtype",
    "qwen3": "max_window_layers sliding_window use_sliding_window rope_scaling attention_bias",
    "qwen3_moe": "decoder_sparse_step mlp_only_layers output_router_logits router_aux_loss_coef",
    "mamba2": "norm_before_gate rms_norm residual_in_fp32 time_step_init_scheme fused_add_norm",
    "qwen3_next": "full_attention_interval decoder_sparse_step use_sliding_window rope_scaling",
}
VALUES = {
    "pretraining_tp": 1,
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
    "rope_scaling": None,
    "max_window_layers": 28,
    "sliding_window": 32_768,
    "use_mrope": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "norm_before_gate": True,
    "rms_norm": True,
    "residual_in_fp32": True,
    "time_step_init_scheme": "random",
    "fused_add_norm": True,
    "full_attention_interval": 4,
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_fields_of_published_models_are_known(family, tmp_path):
    """Fields that their files have beside those of transformers' class."""
    shape = {"model_type": family, **SMALL_CONFIGS[family]}
    more = {name: VALUES[name] for name in PUBLISHED[family].split() if name not in shape}
    assert read(tmp_path, {**more, **shape}).width == 48


REFUSED = {
    "activation": ("llama", {"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
    "bias": ("llama", {"attention_bias": True}, ("attention_bias", "True")),
    "mlp bias": ("llama", {"mlp_bias": True}, ("mlp_bias",)),
    "yarn": (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ("rope_type", "'yarn'", "'llama3'"),
    ),
    "half a scaling": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
        ("rope_scaling: high_freq_factor", "no such field"),
    ),
    "partial rotation": ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    "unknown part of a scaling": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5}},
        ("rope_scaling: attention_factor", "0.5"),
    ),
    "window": ("qwen2", {"use_sliding_window": True}, ("use_sliding_window", "True")),
    "windowed layer": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        ("layer_types", "sliding_attention"),
    ),
    "kind of a scaling": (
        "llama",
        {"rope_scaling": {"rope_type": [], "factor": 2.0}},
        ("rope_type", "[]", "'linear'"),
    ),
    "kind of a model": ("llama", {"model_type": []}, ("model_type", "[]")),
    "uneven experts": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "decoder_sparse_step": 1},
        ("mlp_only_layers", "[0]"),
    ),
    "quantised": (
        "llama",
        {"quantization_config": {"quant_method": "gptq"}},
        ("quantization_config", "gptq"),
    ),
    "unknown field": (
        "llama",
        {"logits_scaling": 8.0},
        ("logits_scaling", "8.0", "not known for llama", "Take it out"),
    ),
    "no width": ("llama", {"hidden_size": None}, ("hidden_size", "no such field")),
    "text for a number": ("llama", {"hidden_size": "48"}, ("hidden_size", "'48'")),
    "negative": ("llama", {"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
    "no vocabulary": ("llama", {"vocab_size": 0}, ("vocab_size", "0")),
    "heads that do not divide": ("llama", {"num_key_value_heads": 3}, ("model.kv_heads", "3")),
    "expand": ("mamba2", {"expand": 3}, ("expand", "144", "96")),
    "two layer kinds short": (
        "qwen3_next",
        {"layer_types": ["full_attention"]},
        ("layer_types", "4 layers"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case, tmp_path):
    family, changes, parts = REFUSED[case]
    fields = {"model_type": family, **SMALL_CONFIGS[family], **changes}
    with pytest.raises((ConfigError, UnsupportedError)) as raised:
        read(tmp_path, fields)
    assert str(tmp_path) in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


def test_the_names_of_transformers_4_mean_the_same(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **scaling}}
    shape = {"model_type": "llama", **SMALL_CONFIGS["llama"]}
    first, second = (read(tmp_path, {**shape, **rope}) for rope in (old, new))
    assert first == second
    assert (first.rope_theta, first.rope_factor, first.rope_original_context) == (500.0, 8.0, 64)
    assert read(tmp_path, {**shape, "rope_scaling": None}).rope_scaling == "none"


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt": ({}, "llama"),
    "biases": ({"qkv_bias": True}, "qwen2"),
    "norms": ({"qk_norm": True, "rope_scaling": "linear", "rope_factor": 2.0}, "qwen3"),
    "experts": ({"qk_norm": True, "experts": 4, "experts_per_token": 1}, "qwen3_moe"),
    "some experts": ({"qk_norm": True, "experts": 4, "moe_every": 2}, "qwen3_moe"),
    "mamba": ({"pattern": "M", "mlp_width": "none", "mamba_heads": 8}, "mamba2"),
    "hybrid": (
        {
            "pattern": "GGGA",
            "qk_norm": True,
            "attention_gate": True,
            "norm_zero_centred": True,
            "rotary_fraction": 0.5,
        },
        "qwen3_next",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_written_as_the_family_that_has_it(name, tmp_path):
    keys, expected = MODELS[name]
    model = resolve_model(ModelConfig(**keys))
    family, fields = write_config(model, 300)
    assert family.model_type == expected
    assert effective(resolve_model(read(tmp_path, fields))) == effective(model)
    # Transformers takes the same from it.
    kind = transformers.AutoConfig.for_model(**fields)
    assert (kind.vocab_size, kind.hidden_size) == (300, 256)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"pattern": "M"}, ("model.mlp_width=704 instead of none", "mamba2")),
        ({"pattern": "G"}, ("model.norm_zero_centred=false instead of true", "qwen3_next")),
        ({"pattern": "AM"}, ("blocks AMAM",)),
        ({"qkv_bias": True, "qk_norm": True}, ("model.qk_norm", "qwen2")),
        ({"experts": 4, "shared_expert_width": 64, "qk_norm": True}, ("shared_expert_width",)),
        ({"rotary_fraction": 0.5}, ("model.rotary_fraction", "llama")),
    ],
)
def test_a_model_of_no_family_is_refused(keys, parts):
    with pytest.raises(UnsupportedError) as raised:
        write_config(resolve_model(ModelConfig(**keys)), 300)
    for part in parts:
        assert part in str(raised.value)


def test_a_changed_model_keeps_what_has_no_effect():
    before = {"model_type": "llama", **SMALL_CONFIGS["llama"], "pad_token_id": 7}
    before["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    model = resolve_model(ModelConfig(width=32, heads=2))
    family, fields = write_config(model, 400, carried=before)
    assert (family.model_type, fields["vocab_size"], fields["pad_token_id"]) == ("llama", 400, 7)
    assert "rope_scaling" not in fields


def test_patterns_are_the_shortest():
    assert [pattern_of(x) for x in ("A", "AA", "GGGA" * 3, "GA" * 2, "GGA", "GAG")] == [
        *("A", "A", "GGGA", "GA", "GGA", "GAG")
    ]


def test_each_family_says_each_key_once():
    """A key of ours that two fields set, or none, would be a mistake in a table."""
    names = {item.name for item in dataclasses.fields(ModelConfig)}
    for family in FAMILIES:
        assert family.keys.keys() <= names
        assert len(family.names) == len(set(family.names)), family.model_type
