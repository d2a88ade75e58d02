"""Text that follows a JSON schema, an expression or a grammar, by the library llguidance."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pcomm.core.cli import what_to_install
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.sampling.params import SamplingParams
from pcomm.inference.text import JsonTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = [
    "LARGEST_MULTIPLE",
    "LONGEST_SCHEMA",
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarMatcher",
]


LONGEST_SCHEMA = 64 * 1024
"""Most bytes of the text of a schema or a grammar."""
LARGEST_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf` of a schema, in units of their last decimal digit."""
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
            ConfigError: The schema, expression or grammar cannot be compiled, with the reason; a
                schema or grammar is above `LONGEST_SCHEMA` or `LARGEST_MULTIPLE`; or the engine has
                no tokenizer, or one without an end token.
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
        from llguidance import LLMatcher, grammar_from

        if name == "json_schema":
            schema = _parsed(text)
            _check_multiples(schema, name)
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
        elif name == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            _check_length(name, text)
            for schema in _inner_schemas(text):
                _check_multiples(schema, name)
            try:
                grammar = grammar_from("grammar", text)
            except ValueError as error:
                raise _cannot_compile(name, str(error)) from error
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
        try:
            return LLTokenizer(tokenizer.to_json(), self._vocabulary, list(tokenizer.eos_ids))
        except ValueError as error:
            raise UnsupportedError(
                f"SamplingParams: {name}",
                found=f"llguidance does not read the tokenizer of the model: {error}",
                why="The tokens that a grammar allows are found by their bytes.",
                fix="Ask without a grammar, or serve a model whose tokenizer has a byte-level "
                "decoder or one with byte fallback.",
            ) from error

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


def _check_length(name: str, text: str) -> None:
    if (length := len(text.encode("utf-8", "surrogatepass"))) > LONGEST_SCHEMA:
        raise ConfigError(
            f"SamplingParams: {name}",
            found=f"{length} bytes",
            why="The time and the memory to compile it grow with its length.",
            fix=f"Give one of at most {LONGEST_SCHEMA} bytes.",
        )


def _inner_schemas(grammar: str) -> Iterator[object]:
    """The schemas that stand behind `%json` in a grammar; the compiler finds what is no JSON."""
    for found in re.finditer(r"%json\s*", grammar):
        with contextlib.suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(grammar, found.end())[0]


def _parsed(text: str) -> object:
    _check_length("json_schema", text)
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
        # Behind the first lines it may show the whole text, or all special tokens.
        found=f"{reason.strip():.500}",
        why="The tokens that it allows cannot be computed.",
        fix="Give another one; llguidance documents what it supports of each.",
    )


def _check_multiples(schema: object, name: str) -> None:
    """Refuse a schema whose numbers need too large an automaton.

    A number is matched by an automaton with a state for each remainder. `allOf`, `$ref` and the
    other ways to combine schemas multiply those states, at most to the common multiple of all
    `multipleOf`; so one limit on that multiple bounds the compilation, whatever is combined.

    """
    multiples = sorted(set(_multiples(schema)))
    # The decimal digits count, as in llguidance: 99.991 has 99,991 remainders of 0.001.
    places = max((-int(one.as_tuple().exponent) for one in multiples), default=0)
    common = 1
    for one in multiples:
        common = math.lcm(common, int(one.scaleb(max(places, 0))))
        if common > LARGEST_MULTIPLE:
            raise ConfigError(
                f"SamplingParams: {name}",
                found=f"multipleOf {', '.join(f'{float(each):.10g}' for each in multiples[-5:])}",
                why="Each remainder is a state of the grammar, and several multipleOf multiply "
                "their states.",
                fix="Give multipleOf whose least common multiple, in units of the last decimal "
                f"digit, is at most {LARGEST_MULTIPLE}.",
            )


def _multiples(schema: object) -> Iterator[Decimal]:
    """The size of every number named `multipleOf`, at any depth; 0 is left to the compiler."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            waiting.extend(part.values())
            value = part.get("multipleOf")
            if not isinstance(value, int | float):
                continue
            number = abs(Decimal(repr(value + 0)).normalize())
            if number and number.is_finite():
                yield number


class CompiledGrammar:
    """The `json_schema`, `regex` or `grammar` of some settings; made by `GrammarCompiler.compile`.

    Args:
        matcher: Matcher at the begin of a text.
        key: `grammar_key` of the settings.
        tokenizer: Tokenizer that it was compiled for.
        vocabulary: Number of logits of the model.
    """

    def __init__(
        self, matcher: LLMatcher, *, key: tuple[str, str], tokenizer: Tokenizer, vocabulary: int
    ) -> None:
        self._matcher, self._key = matcher, key
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def begin(self) -> GrammarMatcher:
        """The place of a new text in the grammar. Local; not from two threads at once."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary)

    def check(self, params: SamplingParams, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        """Refuse a request that asks for another text, or an engine of another model. Local.

        Args:
            params: Settings of the request.
            tokenizer: Tokenizer of the engine.
            vocabulary: Number of logits of its model.

        Raises:
            ConfigError: The settings have another grammar, or the engine another vocabulary.
        """
        if grammar_key(params) != self._key:
            found = "a grammar that was compiled from other settings"
        elif tokenizer is not self._tokenizer or vocabulary != self._vocabulary:
            found = "a grammar that was compiled for another tokenizer or vocabulary"
        else:
            return
        raise ConfigError(
            "Engine.add: grammar",
            found=found,
            why="It allows the tokens of a text that this request does not ask for.",
            fix="Give what GrammarCompiler.compile returns for its params, with the tokenizer and "
            "the vocabulary of the engine; or None.",
        )


def grammar_key(params: SamplingParams) -> tuple[str, str] | None:
    """The name and the text of the grammar in some settings; None without one. Local."""
    for name in ("json_schema", "regex", "grammar"):
        if (text := getattr(params, name)) is not None:
            return name, text
    return None


class GrammarMatcher:
    """The place in a grammar that the text of one request has reached; see `CompiledGrammar`.

    Args:
        matcher: Matcher at the begin of a text, used by no other request.
        vocabulary: Number of logits of the model.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocabulary // 32)

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and no token can follow but an end."""
        return bool(self._matcher.is_stopped())

    def allowed_words(self) -> Tensor:
        """int32 `[ceil(V / 32)]` on the CPU: bit `i % 32` of word `i // 32` allows token `i`."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        self._check("allowed_words")
        return words[: self._num_words]

    def accept(self, token_id: int) -> None:
        """Go on behind a token.

        Raises:
            UnsupportedError: The grammar forbids the token, or became larger than llguidance can
                follow. The request cannot go on; others are not affected.
        """
        self._matcher.consume_token(token_id)
        self._check(f"accept({token_id})")

    def _check(self, asked: str) -> None:
        if self._matcher.is_error():
            raise UnsupportedError(
                f"grammar of a request: {asked}",
                # Behind the first line llguidance shows the state of its parser.
                found=str(self._matcher.get_error()).strip().split("\n")[0],
                why="llguidance cannot go on, so that no token is known to be allowed.",
                fix="End the request; a simpler schema or expression avoids limits of size.",
            )
