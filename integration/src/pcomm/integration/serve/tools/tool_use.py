"""What a chat request says of tools: checked, for the template, the grammar and the reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pcomm.integration.serve.api_error import ApiError
from pcomm.integration.serve.request_bodies import (
    AnyMessage,
    AssistantMessage,
    ChatRequest,
    NamedTool,
    ToolMessage,
)
from pcomm.integration.serve.tools.call_format import CALL_FORMATS, CallFormat
from pcomm.integration.serve.tools.call_reader import CallReader, PlainReader, call_reader

__all__ = ["ToolUse", "plain_messages", "portable"]

_ANYTHING: dict[str, Any] = {"type": "object", "properties": {}}


class ToolUse:
    """The functions that one request offers, and whether they are called.

    With `tool_choice` `none` it is as if no function were offered.

    Args:
        body: Fields of the request.
        form: How the model writes calls; None where that is not known.

    Attributes:
        descriptions: Tools for the template; None for none.

    Raises:
        ApiError: The fields do not fit together, or the model has no known format.
    """

    def __init__(self, body: ChatRequest, form: CallFormat | None) -> None:
        choice, offered = body.tool_choice or "auto", body.tools or []
        if not offered and choice not in ("auto", "none"):
            raise _invalid("tool_choice", "tool_choice asks for a call, and there are no tools.")
        names = [tool.function.name for tool in offered]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise _invalid(f"tools.{place}.function.name", f"Two tools have the name {name!r}.")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            message = f"tool_choice names {choice.function.name!r:.100}, which is not in tools."
            raise _invalid("tool_choice.function.name", message)
        self._form, self._schemas = form, dict[str, dict[str, Any]]()
        self.descriptions: list[dict[str, Any]] | None = None
        if not offered or choice == "none":
            return
        if form is None:
            raise ApiError(
                400,
                "The chat template of this model says nothing of tools, or has them called in a "
                f"format that this server does not know. It knows {', '.join(CALL_FORMATS)}: with "
                "--tool-format it takes one of them for any template.",
                param="tools",
                code="unsupported_parameter",
            )
        self.descriptions = []
        is_bound = choice != "auto" or body.parallel_tool_calls is False
        for place, tool in enumerate(offered):
            function = tool.function
            schema = _ANYTHING if function.parameters is None else function.parameters
            param = f"tools.{place}.function.parameters"
            if schema.get("type", "object") != "object":
                raise _invalid(param, f"{param}: arguments are an object, and type is another.")
            portable(schema, param)
            about = {"name": function.name, "description": function.description}
            about = {key: text for key, text in about.items() if text is not None}
            self.descriptions.append(
                {"type": "function", "function": {**about, "parameters": schema}}
            )
            is_bound = is_bound or bool(function.strict)
            if not isinstance(choice, NamedTool) or function.name == choice.function.name:
                closed = {"additionalProperties": False} if function.parameters is None else {}
                self._schemas[function.name] = {**schema, **closed}
        self._is_bound, self._must_call = is_bound, choice != "auto"
        self._has_many = body.parallel_tool_calls is not False
        # One function is named to be called once.
        self._has_many = self._has_many and not isinstance(choice, NamedTool)

    def grammar(self, answer: Mapping[str, Any] | None) -> str | None:
        """The grammar of the text; None where calls need none. Local.

        Calls are bound where one has to come or only one may come, and by `strict`.

        Args:
            answer: JSON schema of a text without a call; None for any text.

        Raises:
            ApiError: An answer in JSON could not be told from a call.
        """
        if not self.descriptions or self._form is None:
            return None
        if not self._is_bound and answer is None:
            return None
        if answer is not None and not self._must_call and not self._form.begin:
            raise _invalid(
                "response_format",
                "This model calls functions by bare JSON, from which an answer in JSON cannot be "
                "told. Send tool_choice none or required, or no response_format.",
            )
        return self._form.grammar(
            self._schemas, must_call=self._must_call, has_many=self._has_many, answer=answer
        )

    def reader(self) -> CallReader:
        """A reader of one text."""
        if not self.descriptions or self._form is None:
            return PlainReader()
        return call_reader(self._form, self._schemas)


def plain_messages(messages: Sequence[AnyMessage]) -> list[dict[str, object]]:
    """Messages as templates read them: one text each, arguments as objects. Local.

    Raises:
        ApiError: The arguments of a call are no JSON object, or an answer says nothing.
    """
    called: dict[str, str] = {}
    found = []
    for place, message in enumerate(messages):
        parts = message.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts
        # `developer` is the newer name, which templates do not know.
        role = "system" if message.role == "developer" else message.role
        plain: dict[str, object] = {"role": role, "content": text, "name": message.name}
        if isinstance(message, AssistantMessage) and message.tool_calls:
            calls = []
            for number, call in enumerate(message.tool_calls):
                param = f"messages.{place}.tool_calls.{number}.function.arguments"
                called[call.id] = call.function.name
                about = {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, param),
                }
                calls.append({"id": call.id, "type": "function", "function": about})
            # Clients send null beside calls; templates that add the content to a text need one.
            plain |= {"tool_calls": calls, "content": text or ""}
        elif text is None:
            message_ = "An answer has content or tool_calls."
            raise ApiError(
                400, message_, param=f"messages.{place}.content", code="missing_parameter"
            )
        if isinstance(message, ToolMessage):
            plain["tool_call_id"] = message.tool_call_id
            # Some templates ask for it, and clients of OpenAI's do not send it.
            plain["name"] = message.name or called.get(message.tool_call_id)
        found.append({key: value for key, value in plain.items() if value is not None})
    return found


def portable(value: object, param: str) -> None:
    """Refuse what Python reads as JSON and cannot write as such. Local.

    Raises:
        ApiError: `value` has halves of surrogate pairs, NaN, or too many levels.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _invalid(param, f"{param} is no JSON: {error}."[:500]) from error


def _arguments(text: str, param: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise _invalid(param, f"{param} is no JSON: {error}."[:500]) from error
    if not isinstance(found, dict):
        raise _invalid(param, f"{param}: the JSON is no object.")
    portable(found, param)
    return found


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
