"""How a model writes the calls of functions: found in its template, held to by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcomm.core.errors import ConfigError, near_misses

__all__ = ["CALL_FORMATS", "CallFormat", "call_format", "lark_words"]

# As `json.dumps` and the templates write it. Blanks in other places could go on for ever.
_AS_IN_TEMPLATES = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True)
class CallFormat:
    """One way to write a call, as JSON with the keys `name` and `arguments`.

    Attributes:
        name: Name of the format in options.
        arguments: Key of the arguments.
        begin: Text before each call; empty for a format whose calls are the whole text.
        end: Text behind each call.
    """

    name: str
    arguments: str
    begin: str = ""
    end: str = ""

    def grammar(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        must_call: bool,
        has_many: bool,
        answer: Mapping[str, Any] | None = None,
    ) -> str:
        """A Lark grammar of the texts whose calls are right. Local.

        Args:
            schemas: JSON schema of the arguments of each function, by its name.
            must_call: True for texts of calls alone; False also for those without one.
            has_many: True for any number of calls, where the format has that; False for one.
            answer: JSON schema of a text without a call, for a format with `begin`; None for any
                text.
        """
        blank = "\n" if self.begin else ""
        rules = ["%llguidance {}"]
        bodies = []
        for place, (name, schema) in enumerate(schemas.items()):
            head = f"{blank}{{{json.dumps('name')}: {json.dumps(name)}, "
            head += f"{json.dumps(self.arguments)}: "
            tail = f"}}{blank}{self.end}"
            bodies.append(f"body{place}")
            rules += [
                f"body{place}: {lark_words(head)} arguments{place} {lark_words(tail)}",
                f"arguments{place}: %json {_dumped({'type': 'object', **schema})}",
            ]
        rules.append(f"body: {' | '.join(bodies)}")
        first = lark_words(self.begin) if self.begin else ""
        other = ""
        if not must_call and answer is not None:
            rules.append(f"text: %json {_dumped(answer)}")
            other = "text | "
        elif not must_call:
            other = "TEXT | "
            if self.begin:
                # Once the words that begin a call are written, one has to follow.
                rules += ["TEXT: /(?s:.*)/", f"begun[lazy]: /(?s:.*){re.escape(self.begin)}/"]
                first = "begun"
            else:
                rules.append(r"TEXT: /(\s*[^{\s](?s:.*))?/")
        more = f" ({lark_words(blank + self.begin)} body)*" if self.begin and has_many else ""
        rules.append(f"start: {other}{first} body{more}")
        return "\n".join(rules)


CALL_FORMATS = {
    one.name: one
    for one in (
        CallFormat("hermes", "arguments", "<tool_call>", "</tool_call>"),
        CallFormat("llama3", "parameters"),
    )
}
"""The formats by name: that of Hermes and Qwen, and that of Llama 3."""

# In the source of a template a quotation mark may have a backslash before it.
_HERMES = re.compile(r'\\?"arguments\\?":')
_LLAMA = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":')
# Of formats that have the same mark, and no JSON behind it.
_OTHERS = ("<function=", "<arg_key>")


def call_format(template: str, asked: str | None = None) -> CallFormat | None:
    """The format in which a model writes calls; None for one that is not known. Local.

    Args:
        template: Source of its chat template.
        asked: Name of a format, whatever the template says; None for that of the template.

    Raises:
        ConfigError: There is no such format.
    """
    if asked is not None:
        if asked not in CALL_FORMATS:
            raise ConfigError(
                "tool_format",
                found=f"{asked!r}",
                why=f"Calls are read in one of these: {', '.join(CALL_FORMATS)}.",
                fix=near_misses(asked, CALL_FORMATS),
            )
        return CALL_FORMATS[asked]
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        is_json = _HERMES.search(template) and not any(mark in template for mark in _OTHERS)
        return CALL_FORMATS["hermes"] if is_json else None
    return CALL_FORMATS["llama3"] if _LLAMA.search(template) else None


def lark_words(text: str) -> str:
    """A string in the language of grammars. Local."""
    return json.dumps(text)


def _dumped(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _AS_IN_TEMPLATES})
