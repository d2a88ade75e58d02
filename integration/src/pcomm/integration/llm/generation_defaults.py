"""`generation_config.json`: how a model's makers draw its tokens, as defaults of requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.inference import SamplingParams

__all__ = ["GenerationDefaults", "generation_defaults"]

_log = logging.getLogger("pcomm.llm")

_CHOICES = ("auto", "none")

# Its names, and those of `SamplingParams`. Its max_new_tokens counts new tokens alone, too.
_NAMES = {
    **{one: one for one in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}

# What changes no token of one text: ids that are read elsewhere, how it is computed or returned,
# drafts, and what is for beams alone.
_NO_EFFECT = frozenset(
    (
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"),
        *("_from_model_config", "do_sample", "transformers_version", "renormalize_logits"),
        *("cache_config", "cache_implementation", "max_cache_len", "use_cache", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"),
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
        *("return_dict_in_generate", "is_assistant", "num_assistant_tokens", "use_mtp"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
        *("target_lookbehind", "speculation_type", "prompt_lookup_num_tokens"),
        *("max_matching_ngram_size", "early_stopping", "length_penalty", "diversity_penalty"),
    )
)
_NEUTRAL: Mapping[str, object] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "min_length"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Settings of requests that name no others.

    Attributes:
        fields: Fields of `SamplingParams` with their values; empty for a model that has none.
        unmet: Names of the fields that would change a text, and that pcomm does not have.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()

    def params(
        self, given: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Settings of a request. Local.

        Args:
            given: Fields that the request has.
            otherwise: Fields that count where neither the request nor the model has them; those
                of `SamplingParams` count last.

        Raises:
            ConfigError: A value of the request cannot be used.
        """
        fields = {**(otherwise or {}), **self.fields, **given}
        if "min_tokens" in fields and "min_tokens" not in given:
            most = fields.get("max_tokens", SamplingParams.max_tokens)
            fields["min_tokens"] = min(fields["min_tokens"], most)
        return SamplingParams(**fields)

    def __str__(self) -> str:
        """The fields for a person, such as `temperature 0.6, top_p 0.9`; empty for none."""
        return ", ".join(f"{name} {value}" for name, value in self.fields.items())


def generation_defaults(choice: str | None, content: Mapping[str, Any]) -> GenerationDefaults:
    """The defaults that a model brings. Local.

    Values of transformers mean there what they mean here, with two exceptions: a temperature
    counts without `do_sample`, as servers read it, and a `do_sample` of false is temperature 0.

    Args:
        choice: `auto` for those of `content`; `none`, or None, for no defaults.
        content: Content of its `generation_config.json`; empty if there is none.

    Raises:
        ConfigError: `choice` is something else, or a value cannot be used.
    """
    if choice is not None and choice not in _CHOICES:
        raise ConfigError(
            f"LLM: generation_config={choice!r}",
            found=f"{choice!r:.100}",
            why="Defaults of requests are those of the generation_config.json of the model.",
            fix="Give `auto` for these, or `none` for those of SamplingParams.",
        )
    if choice != "auto":
        return GenerationDefaults()
    known = {name: value for name, value in content.items() if not _is_nothing(value)}
    fields = {own: known[name] for name, own in _NAMES.items() if name in known}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if content.get("do_sample") is False:
        fields["temperature"] = 0.0
    unmet = [
        name
        for name, value in known.items()
        if name not in _NAMES and name not in _NO_EFFECT and _NEUTRAL.get(name) != value
    ]
    found = GenerationDefaults(fields, tuple(sorted(unmet)))
    try:
        found.params({})
    except ConfigError as error:
        raise ConfigError(
            "generation_config.json of the model",
            found=f"{error.asked}: {error.found}",
            why=error.why,
            fix="Correct the file, or leave it out with `--generation-config none`; "
            "`LLM(..., generation_config='none')`.",
        ) from error
    return found


def warn_unmet(name: str, defaults: GenerationDefaults) -> None:
    """Log the fields of a model that have no effect; nothing if there are none. Local.

    Args:
        name: Name of the model.
        defaults: Defaults that its directory gives.
    """
    if defaults.unmet:
        _log.warning(
            "generation_config.json of %s: %s: pcomm does not have these, and texts are drawn "
            "without them",
            name,
            ", ".join(defaults.unmet),
        )


def _is_nothing(value: object) -> bool:
    """Whether it is what transformers has for a field that is off."""
    return value is None or value is False or value in ([], {}, "")
