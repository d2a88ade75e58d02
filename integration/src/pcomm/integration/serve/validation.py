"""What is wrong with the body of a request, told with the name of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pcomm.core.errors import near_misses
from pcomm.integration.serve.api_error import ApiError
from pcomm.integration.serve.chat_request import ChatRequest
from pcomm.integration.serve.completion_request import CompletionRequest
from pcomm.integration.serve.request_fields import RequestFields

__all__ = ["unreadable_body", "validation_error"]

_UNSUPPORTED = frozenset(
    {
        "audio",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "modalities",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "service_tier",
        "store",
        "suffix",
        "tool_calls",
        "tool_call_id",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
    }
)
"""Fields of the OpenAI API that this server refuses, unless their value changes nothing."""

_KINDS = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
"""Words for the JSON that is no object; any other is a number."""

_REQUESTS: dict[str, type[RequestFields]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


def validation_error(
    errors: Sequence[Mapping[str, Any]], *, body: Any, path: str, content_type: str | None
) -> ApiError:
    """The answer to a body that is no request. Local.

    Args:
        errors: Errors that pydantic and FastAPI have found, at least one.
        body: The body as JSON was read from it; the bytes of one that is not sent as JSON.
        path: Path of the route.
        content_type: Header of this name; None for none.
    """
    # A field of several types has errors for each of them.
    first = min(errors, key=_misfit)
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        message = f"The body is no JSON: {reason} at character {first['loc'][-1]}."
        return ApiError(400, message, code="invalid_json")
    place = _place(first, body)
    if not place:
        return _no_object(first, body, content_type)
    param = ".".join(str(part) for part in place)[:200]
    field = str(place[-1])
    if first["type"] == "extra_forbidden":
        if field in _UNSUPPORTED:
            message, code = f"{param} is not supported by this server.", "unsupported_parameter"
        else:
            message, code = _unknown(param, path), "unknown_parameter"
        return ApiError(400, message, param=param, code=code)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing.", param=param, code="missing_parameter")
    if any(part in _UNSUPPORTED for part in place):
        message, code = f"{param} with this value is not supported.", "unsupported_parameter"
        return ApiError(400, message, param=param, code=code)
    return ApiError(400, f"{param}: {first['msg']}.", param=param, code="invalid_value")


def unreadable_body(cause: BaseException | None) -> ApiError:
    """The answer to a body from which no JSON could be read. Local.

    Args:
        cause: Exception that the reading raised; None for one that is not known.
    """
    if isinstance(cause, RecursionError):
        reason = "arrays or objects are nested too deeply"
    elif isinstance(cause, UnicodeDecodeError):
        reason = f"byte {cause.start} is no {cause.encoding.upper()}"
    else:
        # The one other error of Python's reader: an integer with thousands of digits.
        reason = "a number in it is too long" if isinstance(cause, ValueError) else "unreadable"
    return ApiError(400, f"The body is no JSON: {reason}.", code="invalid_json")


def _no_object(error: Mapping[str, Any], body: Any, content_type: str | None) -> ApiError:
    """The answer to a body that has no fields, or a field whose name is no text."""
    if error["type"] == "string_unicode":
        name = ascii(error["input"])[:100]
        message = f"The name of the field {name} has half of a surrogate pair, which is no text."
    elif isinstance(body, bytes):
        sent = f"with Content-Type {content_type!r:.100}" if content_type else "without a type"
        message = f"The body is sent {sent}; send it with `Content-Type: application/json`."
    else:
        found = "empty" if error["type"] == "missing" else _KINDS.get(type(body), "a number")
        message = f"The body is {found}; send a JSON object."
    return ApiError(400, message, code="invalid_type")


def _misfit(error: Mapping[str, Any]) -> bool:
    """Whether the value is of another type, so that the error of a type that fits says more."""
    return str(error["type"]).endswith("_type")


def _place(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Where in the body an error is; pydantic adds names of the types that it has tried."""
    parts = [part for part in error["loc"] if part != "body"]
    found: list[str | int] = []
    value = body
    for place, part in enumerate(parts):
        is_missing = error["type"] == "missing" and place == len(parts) - 1
        if isinstance(value, dict):
            is_there = part in value
        else:
            is_there = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_there:
            value = value[part]
        elif not is_missing:
            continue
        found.append(part)
    return found


def _unknown(param: str, path: str) -> str:
    for other, request in _REQUESTS.items():
        if other != path and param in request.model_fields:
            return f"{param} is not a field of {path} but of {other}."
    known = _REQUESTS[path].model_fields if path in _REQUESTS and "." not in param else ()
    # A part of a field has no list of names here.
    return f"{param} is not known. {near_misses(param[:50], known) if known else ''}".rstrip()
