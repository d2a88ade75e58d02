"""Grammars from the settings of requests."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING

from pcomm.core.command.checkout import what_to_install
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.engine.sampling.sampling_params import SamplingParams
from pcomm.inference.engine.sampling.structured.compiled_grammar import (
    CompiledGrammar,
    grammar_key,
)
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
    """Makes grammars from settings, so that an error is one of the request with these settings.

    An engine has one of its own. A server makes another one for the same tokenizer, compiles in
    threads that make no steps, and gives the result as `Request.grammar`: llguidance holds no lock
    of Python while it compiles. Nothing is loaded before `load` or the first grammar.

    Args:
        tokenizer: Tokenizer of the model; None where the engine has none.
        vocabulary: Number of logits of the model, at least that of the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._words: LLTokenizer | None = None
        self._words_lock = threading.Lock()
        self._compiled: dict[tuple[str, str], CompiledGrammar] = {}
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar of some settings; None for settings without one. Local; from any thread.

        The last ones are kept, and equal ones are not compiled again.

        Raises:
            ConfigError: The schema or expression cannot be compiled, with the reason; a schema is
                above a limit of `schema_limits`; or the engine has no tokenizer, or one without an
                end token.
            UnsupportedError: llguidance is not installed, or the tokenizer cannot show its
                vocabulary.
        """
        key = grammar_key(params)
        if key is None:
            return None
        if (found := self.kept(params)) is not None:
            return found
        tokenizer = self._checked_tokenizer(key[0])
        grammar = CompiledGrammar(
            self._compile(*key), key=key, tokenizer=tokenizer, vocabulary=self._vocabulary
        )
        with self._lock:
            if len(self._compiled) >= _KEPT and key not in self._compiled:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[key] = grammar
        return grammar

    def kept(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar of some settings if it is compiled and kept. Local; from any thread."""
        key = grammar_key(params)
        with self._lock:
            return None if key is None else self._compiled.get(key)

    def load(self) -> None:
        """Read the vocabulary of the tokenizer now, and not with the first grammar. Local.

        For a large one that takes a second in which no other thread of the process runs. Where it
        cannot be done nothing happens, and the first grammar has the error.
        """
        with contextlib.suppress(ConfigError, UnsupportedError):
            self._load_words("json_schema")

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
        # Some that compile allow no first token, such as a `$ref` to itself.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            reason = str(first.get_error()).strip().split("\n")[0]
            raise _cannot_compile(name, f"no text satisfies it ({reason})")
        return matcher

    def _load_words(self, name: str) -> LLTokenizer:
        with self._words_lock:
            if self._words is None:
                self._words = self._read_words(name)
            return self._words

    def _read_words(self, name: str) -> LLTokenizer:
        tokenizer = self._checked_tokenizer(name)
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise UnsupportedError(
                f"SamplingParams: {name}",
                found="llguidance is not installed",
                why="It finds the tokens that a grammar allows.",
                fix="In a checkout run `python3 -m pip install "
                f"{what_to_install('pcomm-inference', 'structured')}`.",
            ) from error
        return LLTokenizer(tokenizer.to_json(), self._vocabulary, list(tokenizer.eos_ids))

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
    except ValueError as error:
        raise _cannot_compile("json_schema", f"no JSON: {error}") from error
    except RecursionError as error:
        raise _cannot_compile("json_schema", "objects or lists that are nested too deep") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def _cannot_compile(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"SamplingParams: {name}",
        found=reason.strip(),
        why="The tokens that it allows cannot be computed.",
        fix="Give another one; llguidance documents what it supports of each.",
    )
