"""Replies: whole or as parts of a stream, with token texts and usage."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import tokenizers

from pcomm.inference import RequestOutput
from pcomm.inference.sampling import TokenLogprobs
from pcomm.integration.serve.tools.call_reader import CallReader, FunctionCall, PlainReader

__all__ = ["ChatReply", "CompletionReply", "PromptEcho", "Reply", "TokenTexts", "Usage"]

Part = dict[str, Any]


class Reply(Protocol):
    """What makes the JSON of one HTTP request."""

    def chunks(self, place: int, output: RequestOutput) -> list[Part]:
        """Parts of a stream for one output of the text number `place`."""
        ...

    def whole(self, outputs: Sequence[Sequence[RequestOutput]], usage: Usage) -> Part:
        """The answer to a request without `stream`, of all outputs of each text."""
        ...

    def usage_chunk(self, usage: Usage) -> Part:
        """The last part of a stream whose client wants the usage."""
        ...


class _Envelope:
    """What answers and their parts begin with.

    Args:
        answer_id: Field `id`.
        model: Field `model`.
        texts: Texts of single tokens.
        num_texts: Number of texts of the request.
        has_usage: True for parts of a stream with the field `usage`.
        has_logprobs: True if the client asked for log-probabilities.
    """

    kind, chunk_kind = "", ""

    def __init__(
        self,
        answer_id: str,
        model: str,
        texts: TokenTexts,
        *,
        num_texts: int,
        has_usage: bool,
        has_logprobs: bool,
    ) -> None:
        self._id, self._model, self._created = answer_id, model, int(time.time())
        self._texts, self._has_usage, self._has_logprobs = texts, has_usage, has_logprobs
        self._lengths = [0] * num_texts
        self._begun: set[int] = set()

    def usage_chunk(self, usage: Usage) -> Part:
        return self._part(self.chunk_kind) | {"choices": [], "usage": usage.to_json()}

    def _part(self, kind: str) -> Part:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choice: Part) -> Part:
        part = self._part(self.chunk_kind) | {"choices": [choice]}
        # As in the OpenAI API: null in all parts but the last.
        return part | {"usage": None} if self._has_usage else part

    def _whole(self, choices: list[Part], usage: Usage) -> Part:
        return self._part(self.kind) | {"choices": choices, "usage": usage.to_json()}


@dataclass(frozen=True)
class PromptEcho:
    """A prompt that stands before its text in the answer.

    Attributes:
        text: The prompt.
        token_ids: Tokens of the prompt.
        is_alone: True for a request without tokens to write; the engine writes one all the same.
    """

    text: str
    token_ids: Sequence[int]
    is_alone: bool


class CompletionReply(_Envelope):
    """Answers of `/v1/completions`; see `_Envelope` for the other arguments.

    Args:
        answer_id: Field `id`.
        model: Field `model`.
        texts: Texts of single tokens.
        echoes: Prompts that stand before the texts; empty for answers without prompts.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        texts: TokenTexts,
        *,
        echoes: Sequence[PromptEcho] = (),
        **envelope: Any,
    ) -> None:
        super().__init__(answer_id, model, texts, **envelope)
        self._echoes = dict(enumerate(echoes))

    def chunks(self, place: int, output: RequestOutput) -> list[Part]:
        """See `Reply`."""
        is_echoed = place in self._echoes
        if not (output.text or output.finish_reason or output.logprobs or is_echoed):
            return []
        return [self._chunk(self._choice(place, [output]))]

    def whole(self, outputs: Sequence[Sequence[RequestOutput]], usage: Usage) -> Part:
        """See `Reply`."""
        choices = [self._choice(place, parts) for place, parts in enumerate(outputs)]
        return self._whole(choices, usage)

    def _choice(self, place: int, outputs: Sequence[RequestOutput]) -> Part:
        entries = [entry for output in outputs for entry in output.logprobs]
        text = "".join(output.text for output in outputs)
        reason: str | None = outputs[-1].finish_reason if outputs else None
        first: Sequence[int] = ()
        if outputs and (echo := self._echoes.pop(place, None)) is not None:
            if echo.is_alone:
                text, entries, reason = "", [], "length"
            text, first = echo.text + text, echo.token_ids[:1]
            entries = [entry for output in outputs for entry in output.prompt_logprobs] + entries
        return {
            "index": place,
            "text": text,
            "logprobs": self._logprobs(place, entries, first) if self._has_logprobs else None,
            "finish_reason": reason,
        }

    def _logprobs(self, place: int, entries: Sequence[TokenLogprobs], first: Sequence[int]) -> Part:
        """The field `logprobs`, with tokens before the entries, which have none."""
        ids, offsets = [*first, *(entry.token_id for entry in entries)], []
        nothing = [None] * len(first)
        for token in ids:
            offsets.append(self._lengths[place])
            # A special token is named, and no part of the text.
            if not self._texts.is_special(token):
                self._lengths[place] += len(self._texts.text_of(token))
        return {
            "tokens": [self._texts.text_of(token) for token in ids],
            "token_logprobs": [*nothing, *(_finite(entry.logprob) for entry in entries)],
            "top_logprobs": [*nothing, *map(self._top, entries)],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in entry.top.items():
            # Parts of characters have one text; the likeliest of them, which comes first, keeps it.
            found.setdefault(self._texts.text_of(token), _finite(value))
        return found


class ChatReply(_Envelope):
    """Answers of `/v1/chat/completions`; see `_Envelope` for the other arguments.

    A call of a function is sent once it is whole, so that none is ever cut off.

    Args:
        reader: Makes what finds calls in one text.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, *envelope: Any, reader: Callable[[], CallReader] = PlainReader, **fields: Any
    ) -> None:
        super().__init__(*envelope, **fields)
        self._reader = reader
        self._readers: dict[int, CallReader] = {}
        self._num_calls: Counter[int] = Counter()

    def chunks(self, place: int, output: RequestOutput) -> list[Part]:
        """See `Reply`."""
        deltas: list[Part] = []
        for found in self._read(place, output.text, output.finish_reason):
            if isinstance(found, str):
                deltas.append({"content": found})
                continue
            index = {"index": self._num_calls[place]}
            head = index | _call(found.name, "")
            rest = index | {"function": {"arguments": found.arguments}}
            deltas += [{"tool_calls": [head]}, {"tool_calls": [rest]}]
            self._num_calls[place] += 1
        if not (deltas or output.finish_reason or output.logprobs):
            return []
        if place not in self._begun:
            self._begun.add(place)
            deltas = [{"role": "assistant", "content": ""}, *(deltas or [{}])]
        *first, last = deltas or [{}]
        return [*(self._delta(place, one) for one in first), self._delta(place, last, output)]

    def whole(self, outputs: Sequence[Sequence[RequestOutput]], usage: Usage) -> Part:
        """See `Reply`."""
        choices = []
        for place, parts in enumerate(outputs):
            entries = [entry for output in parts for entry in output.logprobs]
            reason = parts[-1].finish_reason if parts else None
            found = self._read(place, "".join(output.text for output in parts), reason)
            text = "".join(one for one in found if isinstance(one, str))
            calls = [one for one in found if not isinstance(one, str)]
            self._num_calls[place] = len(calls)
            message: Part = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                listed = [_call(one.name, one.arguments) for one in calls]
                message |= {"content": text or None, "tool_calls": listed}
            choices.append(
                {
                    "index": place,
                    "message": message,
                    "logprobs": self._logprobs(entries),
                    "finish_reason": self._finish_reason(place, reason),
                }
            )
        return self._whole(choices, usage)

    def _read(self, place: int, text: str, reason: str | None) -> list[str | FunctionCall]:
        if place not in self._readers:
            self._readers[place] = self._reader()
        return self._readers[place].read(text, is_end=reason is not None)

    def _finish_reason(self, place: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._num_calls[place] else reason

    def _delta(self, place: int, delta: Part, output: RequestOutput | None = None) -> Part:
        reason = output.finish_reason if output else None
        return self._chunk(
            {
                "index": place,
                "delta": delta,
                "logprobs": self._logprobs(output.logprobs) if output else None,
                "finish_reason": self._finish_reason(place, reason),
            }
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Part | None:
        if not self._has_logprobs:
            return None
        content = [
            self._token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in entry.top.items()]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Part:
        found = self._texts.bytes_of(token_id)
        return {
            "token": found.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(found),
        }


def _call(name: str, arguments: str) -> Part:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _finite(logprob: float) -> float:
    # JSON has neither infinities nor NaN; this is what other servers send for them.
    return max(logprob, -9999.0) if math.isfinite(logprob) else -9999.0


class Usage:
    """Counts tokens while outputs come.

    Args:
        prompt_lengths: Number of tokens of each prompt, once however many texts continue it.
        has_text: False for prompts that are not continued.
    """

    def __init__(self, prompt_lengths: Sequence[int], *, has_text: bool = True) -> None:
        self._prompt, self._written, self._has_text = sum(prompt_lengths), 0, has_text
        self._cached: dict[int, int] = {}

    def add(self, place: int, output: RequestOutput) -> None:
        """Count one output of the text number `place`."""
        self._written += len(output.token_ids) if self._has_text else 0
        self._cached[place] = output.cached_tokens

    def to_json(self) -> dict[str, Any]:
        """The field `usage`."""
        # Texts of one prompt share its tokens, so that they may count them several times.
        cached = min(sum(self._cached.values()), self._prompt)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._written,
            "total_tokens": self._prompt + self._written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


_BYTE = re.compile("<0x([0-9A-F]{2})>")
_BLANK = "\u2581"


class TokenTexts:
    """What each token of a vocabulary stands for by itself.

    Args:
        tokenizer_json: Content of `tokenizer.json`.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        content = json.loads(tokenizer_json)
        added = content.get("added_tokens") or ()
        self._added = {one["id"]: one["content"] for one in added}
        self._special = {one["id"] for one in added if one.get("special")}
        self._is_byte_level = '"ByteLevel"' in tokenizer_json
        self._bytes = {character: byte for byte, character in _byte_alphabet().items()}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; of a special one its name, and none of an id without a token."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            return bytes(self._bytes[one] for one in name if one in self._bytes)
        if single := _BYTE.fullmatch(name):
            return bytes([int(single[1], 16)])
        return str(name).replace(_BLANK, " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether a text leaves the token out."""
        return token_id in self._special

    def text_of(self, token_id: int) -> str:
        """The text of a token; bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[int, str]:
    """The printable character that GPT-2's byte-level alphabet has for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
