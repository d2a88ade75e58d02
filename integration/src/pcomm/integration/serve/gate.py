"""What every request passes before a route sees it: the API key, and the limit on its body."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcomm.integration.serve.api_error import ApiError, error_response

__all__ = ["Gate"]


class Gate:
    """ASGI middleware that refuses requests without the key, and bodies that are too large.

    Args:
        app: The application behind it.
        api_key: Key that requests to `/v1` show as `Authorization: Bearer KEY`; None for no key.
        max_body_bytes: Most bytes of a body.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self._key is not None and scope["path"].startswith("/v1"):
                self._check_key(self._key, headers.get("authorization", ""))
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length[:18]) > self._max_body_bytes:
                raise self._too_large()
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._max_body_bytes:
                # FastAPI passes on this kind of exception alone from the reading of a body.
                raise HTTPException(413, str(self._too_large()))
            return message

        await self._app(scope, counted, send)

    def _check_key(self, key: bytes, header: str) -> None:
        scheme, _, given = header.partition(" ")
        # In constant time, so that how long it takes tells nothing of the key.
        is_same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key)
        if scheme.lower() != "bearer" or not is_same:
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body has more than {self._max_body_bytes} bytes.",
            code="request_too_large",
            headers={"Connection": "close"},
        )
