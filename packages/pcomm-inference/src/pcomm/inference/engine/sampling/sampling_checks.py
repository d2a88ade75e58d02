"""Checks of sampling settings; every error names the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError

if TYPE_CHECKING:
    from pcomm.inference.engine.sampling.sampling_params import SamplingParams

__all__ = ["check_params", "check_token_ids"]

_LEAST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1
# Beyond any logit, and so far below the largest number of fp32 that no sum or product leaves it.
_LARGEST_EDIT = 1e6


def check_params(params: SamplingParams) -> None:
    """Check all fields, but for the token ids, which need a vocabulary. Local.

    Raises:
        ConfigError: A field has a value of another type or outside its range, or two fields exclude
            each other.
    """
    _number(params, "temperature", "at least 0", lambda value: value >= 0)
    _number(params, "top_p", "above 0 and up to 1", lambda value: 0 < value <= 1)
    _number(params, "min_p", "from 0 to 1", lambda value: 0 <= value <= 1)
    _number(
        params,
        "repetition_penalty",
        f"from {1 / _LARGEST_EDIT:g} to {_LARGEST_EDIT:g}",
        lambda value: 1 / _LARGEST_EDIT <= value <= _LARGEST_EDIT,
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _number(params, name, f"from {-_LARGEST_EDIT:g} to {_LARGEST_EDIT:g}", _is_edit)
    _integer(params, "top_k", 0, fix="0 takes all tokens.")
    _integer(params, "seed", _LEAST_SEED, _LARGEST_SEED)
    _integer(params, "max_tokens", 1)
    _integer(params, "min_tokens", 0)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _integer(params, name, 0, fix="None returns no log-probabilities.")
    if not isinstance(params.ignore_eos, bool):
        raise _wrong("ignore_eos", params.ignore_eos, "True or False")
    _stop(params.stop)
    _ids("stop_token_ids", params.stop_token_ids)
    _bias(params.logit_bias)
    if params.min_tokens > params.max_tokens:
        raise ConfigError(
            f"SamplingParams: min_tokens = {params.min_tokens}",
            found=f"max_tokens = {params.max_tokens}",
            why="A text cannot be longer than its limit before it may end.",
            fix="Give min_tokens up to max_tokens.",
        )
    _grammar(params)


def check_token_ids(params: SamplingParams, vocabulary: int) -> None:
    """Check the token ids of `logit_bias` and `stop_token_ids` against a vocabulary. Local.

    Args:
        params: Settings that were made, so that all else is checked.
        vocabulary: Number of token ids of the model.

    Raises:
        ConfigError: A token id, or a number of log-probabilities, is not below `vocabulary`.
    """
    named: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ]
    for name, ids in named:
        wrong = sorted(token_id for token_id in ids if token_id >= vocabulary)
        if wrong:
            raise ConfigError(
                f"SamplingParams: {name}",
                found=f"token ids {wrong[:5]} and a vocabulary of {vocabulary}",
                why="A token id outside the vocabulary stands for no token of this model.",
                fix=f"Give token ids from 0 to {vocabulary - 1}.",
            )
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is not None and number > vocabulary:
            raise ConfigError(
                f"SamplingParams: {name} = {number}",
                found=f"a vocabulary of {vocabulary}",
                why="There are no more tokens than the vocabulary has.",
                fix=f"Give a number from 0 to {vocabulary}.",
            )


def _wrong(name: str, value: object, wanted: str, fix: str = "") -> ConfigError:
    return ConfigError(
        f"SamplingParams: {name}",
        found=f"{value!r}",
        why=f"{name} is {wanted}.",
        fix=f"Give {name} as {wanted}. {fix}".strip(),
    )


def _is_number(value: object) -> bool:
    # bool is an int to Python, and never what a caller of these fields means.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _is_edit(value: float) -> bool:
    return abs(value) <= _LARGEST_EDIT


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(params: SamplingParams, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
    value = getattr(params, name)
    if not _is_number(value) or not fits(value):
        raise _wrong(name, value, f"a number, {wanted}")


def _integer(
    params: SamplingParams, name: str, least: int, most: int | None = None, *, fix: str = ""
) -> None:
    value = getattr(params, name)
    if not _is_integer(value) or value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise _wrong(name, value, f"an integer, {wanted}", fix)


def _stop(stop: object) -> None:
    wanted = "a tuple of strings that are not empty"
    if not isinstance(stop, Sequence) or isinstance(stop, str | bytes):
        raise _wrong("stop", stop, wanted)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise _wrong("stop", text, wanted)


def _ids(name: str, ids: object) -> None:
    wanted = "a tuple of token ids, integers of at least 0"
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise _wrong(name, ids, wanted)
    for token_id in ids:
        if not _is_integer(token_id) or token_id < 0:
            raise _wrong(name, token_id, wanted)


def _bias(bias: object) -> None:
    wanted = (
        "a mapping of token ids (integers of at least 0) to numbers from "
        f"{-_LARGEST_EDIT:g} to {_LARGEST_EDIT:g}"
    )
    if not isinstance(bias, Mapping):
        raise _wrong("logit_bias", bias, wanted)
    for token_id, value in bias.items():
        is_id = _is_integer(token_id) and token_id >= 0
        if not is_id or not _is_number(value) or not _is_edit(value):
            raise _wrong("logit_bias", {token_id: value}, wanted)


def _grammar(params: SamplingParams) -> None:
    for name in ("json_schema", "regex"):
        value = getattr(params, name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, value, "a string or None")
        if any("\ud800" <= character <= "\udfff" for character in value or ""):
            raise _wrong(name, value, "text without halves of surrogate pairs")
    if params.json_schema is not None and params.regex is not None:
        raise ConfigError(
            "SamplingParams: json_schema and regex",
            found="both of them",
            why="A text follows one grammar.",
            fix="Give one of the two, and None for the other.",
        )
