"""What is wrong with the body of a request, told with the name of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pcomm.core.errors import near_misses
from pcomm.integration.serve.api_error import ApiError
from pcomm.integration.serve.chat_request import ChatRequest
from pcomm.integration.serve.completion_request import CompletionRequest
from pcomm.integration.serve.request_fields import RequestFields

__all__ = ["validation_error"]

_UNSUPPORTED = frozenset(
    {
        "audio",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "parallel_tool_calls",
        "prediction",
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
"""Fields of the OpenAI API that this server knows and refuses."""


_REQUESTS: dict[str, type[RequestFields]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


def validation_error(errors: Sequence[Mapping[str, Any]], *, body: Any, path: str) -> ApiError:
    """The answer to a body that is no request. Local.

    Args:
        errors: Errors that pydantic and FastAPI have found, at least one.
        body: The body as JSON was read from it.
        path: Path of the route.
    """
    # A field of several types has errors for each of them.
    first = min(errors, key=_misfit)
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return ApiError(400, f"The body is no JSON: {reason}", code="invalid_json")
    place = _place(first, body)
    if not place:
        return ApiError(
            400,
            "The body is a JSON object, sent with `Content-Type: application/json`.",
            code="invalid_type",
        )
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
    if field in _UNSUPPORTED:
        message, code = f"{param} with this value is not supported.", "unsupported_parameter"
        return ApiError(400, message, param=param, code=code)
    return ApiError(400, f"{param}: {first['msg']}.", param=param, code="invalid_value")


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
