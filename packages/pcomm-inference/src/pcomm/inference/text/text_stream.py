"""The text of one request while its tokens are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.inference.text.incremental_decoder import IncrementalDecoder
from pcomm.inference.text.stop_matcher import StopMatcher
from pcomm.inference.text.tokenizer import Tokenizer

__all__ = ["TextDelta", "TextStream"]


@dataclass(frozen=True)
class TextDelta:
    """What one token added to the text.

    Attributes:
        text: Text that became certain: whole characters, none of which can still be part of a stop
            string.
        is_stopped: True once a stop string is complete; it is no part of the text, and nothing
            follows.
    """

    text: str
    is_stopped: bool


class TextStream:
    """Tokens to text, one by one. Deltas and `flush` together are the decoded text.

    Where a stop string occurs in it, they are the text before the one that is complete first.
    Tokens that end a request by their id have no text: they are not pushed.

    Args:
        tokenizer: Tokenizer whose `decode` gives the text.
        stop: Strings that end the text.
        min_tokens: Number of tokens within whose text no stop string ends the text.
        prompt: Tokens that the text continues, of which the last ones are looked at. Prompt and
            text together then are the decoded whole: tokenizers that mark spaces drop that of the
            first word, which is not the first one behind a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._matcher = StopMatcher(stop)
        self._left = min_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete, also by what `flush` decoded."""
        return self._matcher.is_stopped

    def push(self, token_id: int) -> TextDelta:
        """Go on by one token. Local."""
        text = self._matcher.push(self._decoder.push(token_id), may_stop=self._left <= 0)
        self._left -= 1
        return TextDelta(text, self._matcher.is_stopped)

    def flush(self) -> str:
        """The rest of the text, at its end: what was held back, and U+FFFD for half a character."""
        text = self._matcher.push(self._decoder.flush(), may_stop=self._left <= 0)
        return text + self._matcher.flush()
