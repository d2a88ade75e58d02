"""Text of tokens one by one, each character given once it is whole."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.inference.text.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder"]

_REPLACEMENT = "\ufffd"
# An unfinished character becomes U+FFFD, and so does what can never be one. From this many tokens
# on it is the latter, but for the last three: a character has at most 3 unfinished bytes, of which
# a decoder makes one U+FFFD or three. Then only the last tokens are decoded again: 3 unfinished
# characters of 3 bytes, and 3 bytes after which a decoder that began within a character is in step.
_MOST_PENDING, _KEPT_PENDING = 24, 12
_MOST_UNFINISHED = 3


class IncrementalDecoder:
    """The text of a sequence of tokens, in parts that together are the decoded whole.

    A token may begin or end within a character, and how it is written may depend on the token
    before it (a leading space is dropped at the begin of a text alone). So each token is decoded
    behind those that made the text before it, and what ends in an unfinished character is held
    back. The work for a token does not depend on the length of the text.

    The parts equal `tokenizer.decode` of all tokens, without that of the prompt. One difference is
    possible where bytes are no UTF-8: libraries with tokens for single bytes write U+FFFD for all
    bytes in a row, if one of them is wrong, and here characters that were whole stay as they are.

    Args:
        tokenizer: Tokenizer whose `decode` gives the text.
        prompt: Tokens before the first one. Their text is not given, but a space behind it is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Tokens whose text was given, whole characters; behind them the others, with the number of
        # characters of theirs that were given.
        self._context = _last_whole(tokenizer, prompt)
        self._context_text = tokenizer.decode(self._context)
        self._pending: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        """Text that became certain with a token; may be empty."""
        self._pending.append(token_id)
        text = self._pending_text()
        if not text and self._is_silent(token_id):
            self._pending.pop()
            return ""
        unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._pending) > _MOST_PENDING:
            unfinished = min(unfinished, _MOST_UNFINISHED)
        certain = len(text) - unfinished
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if text and not unfinished:
            self._context, self._pending, self._given = self._pending, [], 0
            self._context_text = self._tokenizer.decode(self._context)
        elif len(self._pending) > _MOST_PENDING:
            self._forget(len(text) - self._given)
        return new

    def flush(self) -> str:
        """The rest of the text, with U+FFFD for a character that has not become whole."""
        rest = self._pending_text()[self._given :] if self._pending else ""
        self._pending, self._given = [], 0
        return rest

    def _pending_text(self) -> str:
        text = self._tokenizer.decode([*self._context, *self._pending])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._tokenizer.decode(self._pending)

    def _is_silent(self, token_id: int) -> bool:
        # A mark for a space is dropped at the begin of a text, but the second one is not.
        return not self._tokenizer.decode([token_id, token_id])

    def _forget(self, num_held: int) -> None:
        self._context, self._context_text = [], ""
        self._pending = self._pending[-_KEPT_PENDING:]
        self._given = max(len(self._tokenizer.decode(self._pending)) - num_held, 0)


def _last_whole(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt, from the begin of a character on where tokens are bytes."""
    last = [list(prompt[-number:]) for number in range(_KEPT_PENDING, _KEPT_PENDING + 4)]
    return next((some for some in last if _REPLACEMENT not in tokenizer.decode(some)), last[0])
