"""Grammars from the settings of requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.engine.sampling.sampling_params import SamplingParams
from pcomm.inference.engine.sampling.structured.grammar_matcher import GrammarMatcher
from pcomm.inference.engine.sampling.structured.schema_limits import (
    check_schema,
    check_schema_length,
)
from pcomm.inference.text.tokenizer import JsonTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler"]

# Grammars that are kept, for requests that ask for the same one again, such as several
# continuations of a prompt.
_KEPT = 16


class GrammarCompiler:
    """Makes the grammar of a request when it is added, so that errors are errors of that request.

    Nothing is loaded before the first request with a grammar.

    Args:
        tokenizer: Tokenizer of the model; None where the engine has none.
        vocabulary: Number of logits of the model, at least that of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._words: LLTokenizer | None = None
        self._compiled: dict[tuple[str, str], LLMatcher] = {}

    def compile(self, params: SamplingParams) -> GrammarMatcher | None:
        """The grammar at the begin of a text; None for settings without one. Local.

        Raises:
            ConfigError: The schema or expression cannot be compiled, with the reason; a schema is
                above a limit of `schema_limits`; or the engine has no tokenizer, or one without an
                end token.
            UnsupportedError: llguidance is not installed, or the tokenizer cannot show its
                vocabulary.
        """
        for name, text in (("json_schema", params.json_schema), ("regex", params.regex)):
            if text is not None:
                matcher = self._matcher(name, text)
                return GrammarMatcher(matcher.deep_copy(), self._vocabulary)
        return None

    def _matcher(self, name: str, text: str) -> LLMatcher:
        key = (name, text)
        if key not in self._compiled:
            compiled = self._compile(name, text)
            if len(self._compiled) == _KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[key] = compiled
        return self._compiled[key]

    def _compile(self, name: str, text: str) -> LLMatcher:
        words = self._load_words(name)
        from llguidance import LLMatcher

        if name == "json_schema":
            check_schema_length(text)
            schema = _parsed(text)
            check_schema(schema)
            # Options are for objects; `true` is the empty one, and the others are no schemas, which
            # is found below. Blanks between the parts of JSON could go on for ever; without them, a
            # text whose strings and arrays are bounded ends.
            if schema is True:
                schema = {}
            try:
                # Again as text: numbers and strings that JSON has no room for are found here.
                text = json.dumps(schema, allow_nan=False)
                grammar = LLMatcher.grammar_from_json_schema(
                    text,
                    overrides={"whitespace_flexible": False} if isinstance(schema, dict) else None,
                )
            except (ValueError, RecursionError) as error:
                raise _cannot_compile(name, str(error)) from error
        else:
            grammar = LLMatcher.grammar_from_regex(text)
        matcher = LLMatcher(words, grammar, log_level=0)
        if matcher.is_error():
            raise _cannot_compile(name, matcher.get_error())
        return matcher

    def _load_words(self, name: str) -> LLTokenizer:
        if self._words is None:
            tokenizer = self._checked_tokenizer(name)
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise UnsupportedError(
                    f"SamplingParams: {name}",
                    found="llguidance is not installed",
                    why="It finds the tokens that a grammar allows.",
                    fix="python3 -m pip install 'pcomm-inference[structured]'",
                ) from error
            ends = list(tokenizer.eos_ids)
            self._words = LLTokenizer(tokenizer.to_json(), self._vocabulary, ends)
        return self._words

    def _checked_tokenizer(self, name: str) -> JsonTokenizer:
        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.eos_ids:
            raise ConfigError(
                f"SamplingParams: {name}",
                found="an engine without tokenizer" if tokenizer is None else "no end token",
                why="A grammar is matched with the text of tokens, and ends with an end token.",
                fix="Give the engine a tokenizer whose `eos_ids` are not empty.",
            )
        if not isinstance(tokenizer, JsonTokenizer):
            raise UnsupportedError(
                f"SamplingParams: {name}",
                found=f"a {type(tokenizer).__name__} without `to_json`",
                why="The bytes of each token are read from the content of its tokenizer.json.",
                fix="Give the tokenizer a method `to_json` that returns that content.",
            )
        return tokenizer


def _parsed(text: str) -> object:
    # llguidance puts the text into a larger one, and would say where in that it is wrong.
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _cannot_compile("json_schema", f"no JSON: {error}") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def _cannot_compile(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"SamplingParams: {name}",
        found=reason.strip(),
        why="The tokens that it allows cannot be computed.",
        fix="Give another one; llguidance documents what it supports of each.",
    )
