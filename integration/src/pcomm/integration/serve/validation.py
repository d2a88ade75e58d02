"""What is wrong with the body of a request, told with the name of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pcomm.core.errors import near_misses
from pcomm.integration.serve.api_error import ApiError
from pcomm.integration.serve.chat_request import ChatRequest
from pcomm.integration.serve.completion_request import CompletionRequest

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


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The answer to a body that is no request. Local.

    Args:
        errors: Errors that pydantic and FastAPI have found, at least one.
    """
    # A field of several types has an error for each: the first is as good as any.
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return ApiError(400, f"The body is no JSON: {reason}", code="invalid_json")
    place = [part for part in first["loc"] if part != "body"]
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
            known = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
            message = f"{param} is not known. {near_misses(field[:50], known)}"
            code = "unknown_parameter"
        return ApiError(400, message, param=param, code=code)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing.", param=param, code="missing_parameter")
    if field in _UNSUPPORTED:
        message, code = f"{param} with this value is not supported.", "unsupported_parameter"
        return ApiError(400, message, param=param, code=code)
    return ApiError(400, f"{param}: {first['msg']}.", param=param, code="invalid_value")
