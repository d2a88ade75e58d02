"""Errors as the OpenAI API has them: `{"error": {message, type, param, code}}` and a status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel

from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    DivergenceError,
    PcommError,
    PeerError,
    UnsupportedError,
)
from pcomm.inference.engine import QueueFullError

__all__ = [
    "ApiError",
    "ErrorBody",
    "api_error_of",
    "error_response",
    "no_such_model",
    "unavailable",
]

# Until a queue has room, and until a server or its ranks are back.
_RETRY_AFTER_S = "1"
_BACK_AFTER_S = "5"


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: Text for a person, with what to do.
        kind: Field `type`: `invalid_request_error`, `authentication_error`, `rate_limit_error`,
            `server_error`.
        param: Field of the request that is wrong; None for none.
        code: Word for a program; None for none.
        headers: More headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.content: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


def error_response(error: ApiError) -> Response:
    """The answer of an error. Local."""
    # In ASCII: a message may repeat what a client sent, halves of surrogate pairs included.
    content = json.dumps(error.content)
    return Response(content, error.status, error.headers, media_type="application/json")


def no_such_model(asked: str, name: str) -> ApiError:
    """The answer to a request for another model than `name`."""
    message = f"The model {asked!r:.200} does not exist; this server has {name!r}."
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, **headers: str) -> ApiError:
    """The answer of a server that cannot serve now, but will, or another one will."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="unavailable",
        headers={"Retry-After": _BACK_AFTER_S, **headers},
    )


def api_error_of(error: BaseException) -> ApiError:
    """The answer for an exception of the engine or of what is around it. Local."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(
            429,
            f"{error.found}. Try again later.",
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": _RETRY_AFTER_S},
        )
    if isinstance(error, ClosedError):
        return unavailable(str(error))
    if isinstance(error, PeerError | DivergenceError):
        # `/health` has the reason.
        return unavailable("The model has failed while it wrote this text. Send it again later.")
    if isinstance(error, ConfigError | UnsupportedError):
        return ApiError(400, str(error), param=_param(error), code="invalid_value")
    if isinstance(error, PcommError):
        return ApiError(500, str(error), kind="server_error", code="internal_error")
    # What a program of ours raised may name files and values of other requests.
    return ApiError(
        500,
        f"The computation of this request failed: {type(error).__name__}.",
        kind="server_error",
        code="internal_error",
    )


def _param(error: PcommError) -> str | None:
    """The field that an error of the settings names."""
    head, _, rest = error.asked.partition(": ")
    return rest.split(" ")[0] if head == "SamplingParams" and rest else None
