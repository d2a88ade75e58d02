"""Tokens to text while they are written, and the stop strings that end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["JsonTokenizer", "StopMatcher", "TextStream", "Tokenizer"]


class Tokenizer(Protocol):
    """Text to token ids and back; any object with these members."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Token ids by which the model ends a text; may be empty."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without marks of its begin and end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens give none.

        Bytes that are no UTF-8 become U+FFFD, as in every tokenizer library.
        """
        ...


@runtime_checkable
class JsonTokenizer(Tokenizer, Protocol):
    """A tokenizer that can show its vocabulary, as structured output needs."""

    def to_json(self) -> str:
        """The content of `tokenizer.json`, as the library `tokenizers` writes it."""
        ...


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


class StopMatcher:
    """Text up to the first stop string, whatever the parts in which it comes.

    The automaton of Aho and Corasick takes 0.9 us for a token, measured with 2 stop strings. Half
    as many lines with `str.find` take 4.1 us, and 11 us with 16, for each request of a step.

    The first one is that which is complete first; among those that are complete with the same
    character, the longest. Text is held back only while it may become a stop string.

    Args:
        stop: Strings that end the text, none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # Each node is a beginning of a stop string: its continuations, the node of its longest own
        # ending that is a beginning too, its length, and the longest stop string that ends there.
        self._next: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]
        self._depth: list[int] = [0]
        self._match: list[int] = [0]
        for text in stop:
            self._add(text)
        self._link()
        self._node = 0
        self._held = ""
        self.is_stopped = False
        """True from the first stop string on."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that can be shown: none of it is, or can become, part of a stop string. Local.

        Args:
            text: Next part of the text.
            may_stop: False for text whose end can end no stop string, such as that of the first
                `min_tokens` tokens.
        """
        if self.is_stopped:
            return ""
        if len(self._next) == 1:
            return text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            self._node = self._step(text[end])
            length = self._match[self._node]
            if length and may_stop:
                self.is_stopped, self._held = True, ""
                return text[: end + 1 - length]
            while self._node and not self._next[self._node]:
                # A whole stop string that was passed over; no longer one begins with it.
                self._node = self._shorter[self._node]
        certain = len(text) - self._depth[self._node]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Text that was held back, at the end of the text."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, character: str) -> int:
        node = self._node
        while node and character not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(character, 0)

    def _add(self, text: str) -> None:
        node = 0
        for character in text:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(0)
            node = self._next[node][character]
        self._match[node] = len(text)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                self._node = self._shorter[node]
                self._shorter[child] = self._step(character)
                # The node's own string is longer than any that ends within it.
                self._match[child] = self._match[child] or self._match[self._shorter[child]]
                waiting.append(child)
