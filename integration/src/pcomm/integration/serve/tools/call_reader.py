"""Text of a model, part by part, divided into what is text and what is the call of a function."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from pcomm.integration.serve.tools.call_format import CallFormat

__all__ = ["CallReader", "FunctionCall", "PlainReader", "call_reader"]


@dataclass(frozen=True)
class FunctionCall:
    """A call that a model has written.

    Attributes:
        name: Name of the function, one of those that the client offers.
        arguments: JSON object of its arguments.
    """

    name: str
    arguments: str


class CallReader(Protocol):
    """Reads one text; what it returns does not depend on where the text is cut into parts."""

    def read(self, text: str, *, is_end: bool) -> list[str | FunctionCall]:
        """What the next part completes, in its order; blanks around calls are left out.

        Whatever is no whole call of a known function with valid JSON is returned as text.

        Args:
            text: The part.
            is_end: True for the last part.
        """
        ...


class PlainReader:
    """Takes everything for text."""

    def read(self, text: str, *, is_end: bool) -> list[str | FunctionCall]:
        """See `CallReader`."""
        return [text] if text else []


def call_reader(form: CallFormat, names: Collection[str]) -> CallReader:
    """A reader of one text. Local.

    Args:
        form: How the model writes calls.
        names: Names of the functions that it may call.
    """
    return _MarkedReader(form, names) if form.begin else _BareReader(names)


class _MarkedReader:
    """Calls stand between two marks, with text around them."""

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self._names, self._begin, self._end = names, form.begin, form.end
        end = re.escape(form.end)
        # An end within a string of JSON is part of that.
        self._call = re.compile(
            rf'{re.escape(form.begin)}((?:(?!{end})[^"]|"(?:[^"\\]|\\.)*+")*+){end}', re.DOTALL
        )
        self._held = ""
        self._is_behind_call = False

    def read(self, text: str, *, is_end: bool) -> list[str | FunctionCall]:
        """See `CallReader`."""
        self._held += text
        found: list[str | FunctionCall] = []
        while (place := self._held.find(self._begin)) >= 0:
            # To look for the end alone is fast, for the many parts of a call without one.
            is_ended = self._held.find(self._end, place) >= 0
            match = self._call.match(self._held, place) if is_ended else None
            if match is None and not is_end:
                break
            call = _call_of(_parsed(match[1]), self._names) if match is not None else None
            if match is None or call is None:
                # The mark alone is text: a call may begin behind it.
                found += self._taken(place + len(self._begin))
                continue
            behind = self._held[match.end() :]
            found += [*self._taken(len(self._held[:place].rstrip())), call]
            self._held, self._is_behind_call = behind, True
        found += self._taken(len(self._held) if is_end else self._num_sure(place))
        return found

    def _num_sure(self, place: int) -> int:
        """Number of characters that are text whatever follows; a call may begin at `place`."""
        if place < 0:
            place = len(self._held)
            for size in range(min(len(self._begin) - 1, place), 0, -1):
                if self._held.endswith(self._begin[:size]):
                    place -= size
                    break
        return len(self._held[:place].rstrip())

    def _taken(self, number: int) -> list[str]:
        """The first characters of what is held, as text, without blanks behind a call."""
        text, self._held = self._held[:number], self._held[number:]
        if self._is_behind_call:
            text = text.lstrip()
            self._is_behind_call = not text
        return [text] if text else []


class _BareReader:
    """A text is either one of calls, divided by semicolons, or one without."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: str | None = ""

    def read(self, text: str, *, is_end: bool) -> list[str | FunctionCall]:
        """See `CallReader`."""
        if self._held is None:
            return [text] if text else []
        self._held += text
        begin = self._held.lstrip()[:1]
        if begin in ("", "{") and not is_end:
            return []
        held, self._held = self._held, None
        calls = _all_calls(held.strip(), self._names) if begin == "{" else []
        return [*calls] or ([held] if held else [])


def _all_calls(text: str, names: Collection[str]) -> list[FunctionCall]:
    """The calls of a text that is nothing else; none of any other."""
    calls = []
    while text:
        try:
            value, place = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return []
        call = _call_of(value, names)
        if call is None:
            return []
        calls.append(call)
        text = text[place:].lstrip().removeprefix(";").lstrip()
    return calls


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, names: Collection[str]) -> FunctionCall | None:
    """The call that parsed JSON stands for; None for other JSON, of which nothing may be lost."""
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        return None
    # Models mix up the two names of the one key.
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    name = value.get("name")
    if not isinstance(name, str) or name not in names or len(value) != 2 + ("type" in value):
        return None
    if len(given) != 1 or not isinstance(given[0], dict):
        return None
    try:
        # Python reads numbers and constants that are no JSON.
        return FunctionCall(name, json.dumps(given[0], allow_nan=False))
    except (ValueError, RecursionError):
        return None
