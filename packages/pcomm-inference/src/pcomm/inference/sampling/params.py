"""How the next token of a request is chosen, and what the sampler gets and gives for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pcomm.core.errors import ConfigError

__all__ = ["SamplingParams", "SamplingRow", "TokenLogprobs", "check_token_ids"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    r"""Settings of one request; checked when it is made.

    A list is accepted for a tuple. Token ids are checked by `Engine.add`, which knows the
    vocabulary.

    Attributes:
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to draw from; 0 for all.
        top_p: Smallest probability that the likeliest tokens to draw from have together, above 0
            and up to 1.
        min_p: Least probability of a token to draw, as a factor of the largest one.
        repetition_penalty: Divisor of positive logits (factor of negative ones) of tokens that the
            prompt or the text has, from 1e-6 to 1e6; 1 for none.
        presence_penalty: Number taken from the logits of tokens that the text has, from
            -1e6 to 1e6.
        frequency_penalty: Number taken from the logit of a token each time the text has it,
            from -1e6 to 1e6.
        logit_bias: Number added to the logit of a token id, from -1e6 to 1e6.
        seed: Seed of the draws; two requests with the same one, settings and prompt get the same
            tokens, whatever else is in the batch.
        max_tokens: Most tokens to write.
        min_tokens: Fewest tokens before a stop token or stop string ends the text.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Token ids that end the text, in addition to those of the model.
        ignore_eos: True to go on after the model's own stop tokens.
        logprobs: Number of likeliest tokens whose log-probabilities are returned with each token;
            0 gives only that of the token, None none.
        prompt_logprobs: Number of likeliest tokens, as in `logprobs`, for each token of the prompt.
        json_schema: JSON schema that the text satisfies, as a JSON string; None for any text.
        regex: Regular expression that the whole text matches, in the syntax of Rust's crate `regex`
            with Unicode: `\d` and `\w` stand for digits and letters of all scripts, and `[0-9]`
            for ten. None for any text.
        grammar: Grammar of the text, in llguidance's variant of Lark with a rule `start`, or in
            llama.cpp's GBNF, an EBNF with a rule `root ::=`. None for any text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _check(self)
        # What a caller changes later does not change a request that was checked.
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of one token, before temperature and other settings act.

    Attributes:
        token_id: The token that was written, or that the prompt has.
        logprob: Log-probability of that token.
        top: Log-probabilities of the likeliest tokens by id, the likeliest first.
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


# Not frozen: that makes it three times as slow to make, and a step makes one for each request.
@dataclass(slots=True)
class SamplingRow:
    """One row of logits: whose it is, and what has been written before it.

    Two rows with equal fields and logits get the same token, in any batch and order.

    Attributes:
        params: Settings of the request.
        prompt: Token ids of the prompt. Only penalties read them; `array("q")` is read fastest.
        output: Token ids written before the one that is sampled, drafts included. Only penalties
            and `min_tokens` read them; `array("q")` is read fastest.
        position: Position of the sampled token in the request, from 0: the length of prompt and
            output. With the seed it determines the random numbers.
        stop_ids: Token ids that end the request, see `RequestState.stop_ids`; they are not sampled
            before `min_tokens` are written.
        allowed_words: Gives the bit mask of the tokens that the grammar allows behind `output`,
            int32 `[ceil(V / 32)]` on the CPU: bit `i % 32` of word `i // 32` allows token `i`. At
            least one is set, or it is None for any text. It is asked for once the model has been
            started. None for a row without a grammar.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    position: int
    stop_ids: tuple[int, ...] = ()
    allowed_words: Callable[[], Tensor | None] | None = None


def check_token_ids(params: SamplingParams, vocabulary: int) -> None:
    """Check the token ids of `logit_bias` and `stop_token_ids` against a vocabulary. Local.

    Args:
        params: Settings that were made, so that all else is checked.
        vocabulary: Number of token ids of the model.

    Raises:
        ConfigError: A token id, or a number of log-probabilities, is not below `vocabulary`.
    """
    for name in ("logit_bias", "stop_token_ids"):
        wrong = sorted(token_id for token_id in getattr(params, name) if token_id >= vocabulary)
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


_LEAST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1
# Beyond any logit, and so far below the largest number of fp32 that no sum or product leaves it.
_LARGEST_EDIT = 1e6
_EDIT = f"from {-_LARGEST_EDIT:g} to {_LARGEST_EDIT:g}"

_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("above 0 and up to 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": (
        f"from {1 / _LARGEST_EDIT:g} to {_LARGEST_EDIT:g}",
        lambda value: 1 / _LARGEST_EDIT <= value <= _LARGEST_EDIT,
    ),
    "presence_penalty": (_EDIT, lambda value: abs(value) <= _LARGEST_EDIT),
    "frequency_penalty": (_EDIT, lambda value: abs(value) <= _LARGEST_EDIT),
}
# The least, the largest, and what one of them means.
_INTEGERS: dict[str, tuple[int, int | None, str]] = {
    "top_k": (0, None, "0 takes all tokens."),
    "seed": (_LEAST_SEED, _LARGEST_SEED, ""),
    "max_tokens": (1, None, ""),
    "min_tokens": (0, None, ""),
    "logprobs": (0, None, "None returns no log-probabilities."),
    "prompt_logprobs": (0, None, "None returns no log-probabilities."),
}


def _check(params: SamplingParams) -> None:
    """Check all fields, but for the token ids, which need a vocabulary."""
    for name, (wanted, fits) in _NUMBERS.items():
        value = getattr(params, name)
        if not _is_number(value) or not fits(value):
            raise _wrong(name, value, f"a number, {wanted}")
    for name, (least, most, meaning) in _INTEGERS.items():
        value = getattr(params, name)
        if value is None and name in ("logprobs", "prompt_logprobs"):
            continue
        if not _is_integer(value, least) or (most is not None and value > most):
            wanted = f"at least {least}" if most is None else f"from {least} to {most}"
            raise _wrong(name, value, f"an integer, {wanted}", meaning)
    if not isinstance(params.ignore_eos, bool):
        raise _wrong("ignore_eos", params.ignore_eos, "True or False")
    _check_each("stop", "a tuple of strings that are not empty", params, _is_text)
    _check_each(
        "stop_token_ids", "a tuple of token ids, integers of at least 0", params, _is_integer
    )
    _check_bias(params.logit_bias)
    if params.min_tokens > params.max_tokens:
        raise ConfigError(
            f"SamplingParams: min_tokens = {params.min_tokens}",
            found=f"max_tokens = {params.max_tokens}",
            why="A text cannot be longer than its limit before it may end.",
            fix="Give min_tokens up to max_tokens.",
        )
    given = []
    for name in ("json_schema", "regex", "grammar"):
        value = getattr(params, name)
        if value is not None:
            given.append(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, value, "a string or None")
        if any("\ud800" <= character <= "\udfff" for character in value or ""):
            raise _wrong(name, value, "text without halves of surrogate pairs")
    if len(given) > 1:
        raise ConfigError(
            f"SamplingParams: {' and '.join(given)}",
            found=f"{len(given)} of them",
            why="A text follows one grammar.",
            fix="Give one of them, and None for the others.",
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


def _is_integer(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_each(
    name: str, wanted: str, params: SamplingParams, fits: Callable[[object], bool]
) -> None:
    values = getattr(params, name)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise _wrong(name, values, wanted)
    for value in values:
        if not fits(value):
            raise _wrong(name, value, wanted)


def _check_bias(bias: object) -> None:
    wanted = f"a mapping of token ids (integers of at least 0) to numbers {_EDIT}"
    if not isinstance(bias, Mapping):
        raise _wrong("logit_bias", bias, wanted)
    for token_id, value in bias.items():
        is_edit = _is_number(value) and abs(value) <= _LARGEST_EDIT
        if not _is_integer(token_id) or not is_edit:
            raise _wrong("logit_bias", {token_id: value}, wanted)
