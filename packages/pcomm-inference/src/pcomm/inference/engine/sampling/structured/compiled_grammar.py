"""A grammar that is compiled, which any number of texts may follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError
from pcomm.inference.engine.sampling.sampling_params import SamplingParams
from pcomm.inference.engine.sampling.structured.grammar_matcher import GrammarMatcher
from pcomm.inference.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["CompiledGrammar", "grammar_key"]


class CompiledGrammar:
    """The `json_schema` or `regex` of some settings; made by `GrammarCompiler.compile`.

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
    for name, text in (("json_schema", params.json_schema), ("regex", params.regex)):
        if text is not None:
            return name, text
    return None
