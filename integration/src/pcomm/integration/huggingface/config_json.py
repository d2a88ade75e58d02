"""`config.json` to `[model]` and back; fields without an effect here are named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.integration.config.model_rules import expert_blocks, mixers, resolve_model
from pcomm.integration.config.sections import ModelConfig, ResolvedModel, attribute_of
from pcomm.integration.huggingface.directory import ModelDirectory
from pcomm.integration.huggingface.families import FAMILIES
from pcomm.integration.huggingface.families.family import Family, count_of, damaged, refused
from pcomm.integration.huggingface.families.fields import SCALINGS, normalises

__all__ = ["TRAINING", "DirectoryModel", "effective", "read_model", "write_config"]

NO_EFFECT = frozenset(
    (
        # Names, versions, and how transformers computes.
        *("_attn_implementation", "_from_model_config", "_model_name_or_path", "_name_or_path"),
        *("architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation"),
        *("model_type", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config"),
        *("transformers_version", "use_bfloat16", "use_cache"),
        # Training and other tasks.
        *("attention_dropout", "classifier_dropout", "embd_pdrop", "finetuning_task"),
        *("hidden_dropout", "id2label", "initializer_range", "label2id", "output_router_logits"),
        *("problem_type", "resid_pdrop", "router_aux_loss_coef", "task_specific_params"),
        *("tf_legacy_loss",),
        # Token ids and lengths.
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id"),
        *("forced_eos_token_id", "is_decoder", "max_position_embeddings", "max_window_layers"),
        *("pad_token_id", "sep_token_id", "unk_token_id", "vocab_size"),
        # What is returned.
        *("chunk_size_feed_forward", "output_attentions", "output_hidden_states", "output_scores"),
        *("prefix", "return_dict", "return_dict_in_generate"),
        # How text is written.
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty"),
        *("suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
    )
)
"""Fields that change no number of a language model: names, settings of training and of writing."""

NO_EFFECT_PREFIXES = ("unsloth_",)
"""First letters of more of them."""

ONE_VALUE: Mapping[str, Any] = MappingProxyType(
    {
        "add_cross_attention": False,
        "cross_attention_hidden_size": None,
        "is_encoder_decoder": False,
        "pruned_heads": {},
        "quantization_config": None,
        "rms_norm": True,
        "rope_interleaved": False,
        "tie_encoder_decoder": False,
        "use_mrope": False,
    }
)
"""Fields of which one value is supported, beside null."""

TRAINING = ("from_", "init_std", "balance_loss")
"""Keys of `[model]` that say how a model is trained, not what it computes."""


@dataclass(frozen=True)
class DirectoryModel:
    """The model that a directory describes.

    Attributes:
        family: Tables of the directory's family.
        config: Shape of the model.
        vocabulary: Number of its token ids.
        max_tokens: Longest sequence it was made for; None where the directory says nothing.
    """

    family: Family
    config: ModelConfig
    vocabulary: int
    max_tokens: int | None


def read_model(directory: ModelDirectory) -> DirectoryModel:
    """The model that `config.json` describes. Local.

    Raises:
        UnsupportedError: The architecture or a value of a field is not supported, or a field is not
            known; names it.
        ConfigError: A field is missing or damaged; names it.
    """
    their = directory.config
    try:
        family = _family(their)
        config = _read(family, their)
        resolve_model(config)
        vocabulary = count_of(their, "vocab_size")
        longest = their.get("max_position_embeddings")
        max_tokens = None if longest is None else count_of(their, "max_position_embeddings")
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(
            f"model directory {directory.folder}: {error.asked}",
            found=error.found,
            why=error.why,
            fix=error.fix,
        ) from None
    return DirectoryModel(family, config, vocabulary, max_tokens)


def write_config(
    model: ResolvedModel, vocabulary: int, *, carried: Mapping[str, Any] | None = None
) -> tuple[Family, dict[str, Any]]:
    """The family of a model, and its `config.json`. Local.

    Args:
        model: Shape of the model.
        vocabulary: Number of token ids.
        carried: The `config.json` of the directory that the model came from, of which the fields
            without effect on the numbers are kept; None if it came from none.

    Raises:
        UnsupportedError: No family has such a model; names the keys in which the nearest differs.
    """
    if carried and _means(carried, model, vocabulary):
        return _family(carried), dict(carried)
    differences: dict[Family, list[str]] = {}
    for family in FAMILIES:
        written = {**family.write(model), "vocab_size": vocabulary}
        try:
            read_back = resolve_model(_read(family, written))
        except (ConfigError, UnsupportedError) as error:
            differences[family] = [
                f"{error.asked.removeprefix('config.json: ')}: {error.found}"
            ] * 2
            continue
        differences[family] = [
            _difference(name, model, read_back) for name in _differing(model, read_back)
        ]
        if not differences[family]:
            return family, {**_without_effect(family, carried or {}), **written}
    nearest = min(differences, key=lambda family: len(differences[family]))
    raise UnsupportedError(
        f"convert: a model of blocks {mixers(model)}",
        found=f"compared with {nearest.model_type}, the nearest family, "
        + ", ".join(dict.fromkeys(differences[nearest])),
        why="No family of Hugging Face models that this package writes has the same blocks: "
        + ", ".join(family.model_type for family in FAMILIES)
        + ".",
        fix="Train with the keys of one of them; the how-to pages on training and on these "
        "directories have them.",
    )


def effective(model: ResolvedModel) -> dict[str, Any]:
    """The keys of `[model]` that change a number of this model, with their values. Local."""
    letters, with_experts = mixers(model), expert_blocks(model)
    by_part: tuple[tuple[bool, dict[str, Any]], ...] = (
        ("A" in letters, _taken(model, "heads kv_heads head_dim qk_norm qkv_bias attention_gate")),
        ("A" in letters, _taken(model, "rope_theta rotary_fraction rope_scaling")),
        ("A" in letters, _taken(model, " ".join(SCALINGS[model.rope_scaling]))),
        ("G" in letters, _taken(model, "gdn_key_heads gdn_value_heads gdn_key_dim gdn_value_dim")),
        (
            "M" in letters,
            _taken(model, "mamba_heads mamba_head_dim mamba_groups mamba_state_dim")
            | _taken(model, "mamba_conv_bias mamba_min_time_step mamba_max_time_step"),
        ),
        ("G" in letters or "M" in letters, _taken(model, "conv_width")),
        (not all(with_experts), _taken(model, "mlp_width")),
        (
            any(with_experts),
            _taken(model, "experts experts_per_token expert_width shared_expert_width")
            | {"expert_weights": normalises(model)},
        ),
        (any(with_experts) and model.shared_expert_width > 0, _taken(model, "shared_expert_gate")),
    )
    found: dict[str, Any] = {"pattern": letters, "moe_every": with_experts}
    found |= _taken(model, "layers width tie_embeddings norm_eps norm_zero_centred")
    for is_there, values in by_part:
        found |= values if is_there else {}
    return found


def _taken(model: ResolvedModel, names: str) -> dict[str, Any]:
    return {name: getattr(model, name) for name in names.split()}


def _family(their: Mapping[str, Any]) -> Family:
    kind = their.get("model_type")
    known = {family.model_type: family for family in FAMILIES}
    if not isinstance(kind, str) or kind not in known:
        raise UnsupportedError(
            "config.json: model_type",
            found="no such field" if kind is None else f"the value {kind!r:.100}",
            why="Each family has a table of its tensors, and there is none for this one. "
            f"{near_misses(str(kind), known)}",
            fix="Use a model of one of these families: " + ", ".join(known) + ".",
        )
    family = known[kind]
    classes = their.get("architectures")
    if classes and classes != [family.architecture]:
        raise refused("architectures", classes, f"{[family.architecture]}, a language model")
    return family


def _read(family: Family, their: Mapping[str, Any]) -> ModelConfig:
    allowed = {*family.names, *family.ignored_fields, *NO_EFFECT, *ONE_VALUE}
    for name, value in their.items():
        if name in ONE_VALUE and value is not None and value != ONE_VALUE[name]:
            raise refused(name, value, f"{json.dumps(ONE_VALUE[name])}")
        if name not in allowed and not name.startswith(NO_EFFECT_PREFIXES):
            raise UnsupportedError(
                f"config.json: {name}",
                found=f"the value {value!r:.100} of a field that is not known for "
                f"{family.model_type}",
                why="It may change what the model computes, and would be ignored without a word.",
                fix="Take it out of config.json if you know that it changes no number.",
            )
    ours = family.read(their)
    try:
        return ModelConfig(**{attribute_of(key): value for key, (value, _) in ours.items()})
    except ConfigError as error:
        wrong = error.asked.split(", ")
        names = [name for key, (_, name) in ours.items() if f"model.{key}" in wrong]
        raise damaged(", ".join(dict.fromkeys(names)) or "?", error.found, error.why) from None


def _means(their: Mapping[str, Any], model: ResolvedModel, vocabulary: int) -> bool:
    """Whether their configuration is that of our model."""
    try:
        read = resolve_model(_read(_family(their), their))
    except (ConfigError, UnsupportedError):
        return False
    return their.get("vocab_size") == vocabulary and not _differing(model, read)


def _differing(model: ResolvedModel, other: ResolvedModel) -> list[str]:
    ours, theirs = effective(model), effective(other)
    return [
        name
        for name in {**ours, **theirs}
        if (name in ours, ours.get(name)) != (name in theirs, theirs.get(name))
    ]


def _difference(name: str, model: ResolvedModel, other: ResolvedModel) -> str:
    """A key in which two models differ, as `--set` takes it."""
    ours, theirs = (_as_set(getattr(one, name)) for one in (model, other))
    return f"model.{name}={ours}" + (f" instead of {theirs}" if theirs != ours else "")


def _as_set(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_effect(family: Family, carried: Mapping[str, Any]) -> dict[str, Any]:
    kept = NO_EFFECT | set(family.ignored_fields)
    return {name: value for name, value in carried.items() if name in kept}
