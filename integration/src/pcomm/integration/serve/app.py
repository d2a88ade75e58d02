"""The routes of the server, and the limits that each request passes first."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcomm.core.errors import PcommError
from pcomm.integration import __version__
from pcomm.integration.llm import LLM
from pcomm.integration.serve.api_error import (
    ApiError,
    ErrorBody,
    api_error_of,
    error_response,
    no_such_model,
)
from pcomm.integration.serve.output_streams import ClientGoneError
from pcomm.integration.serve.request_bodies import (
    ChatRequest,
    CompletionRequest,
    unreadable_body,
    validation_error,
)
from pcomm.integration.serve.service import ServeSettings, Service

__all__ = ["Served", "create_app"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 429, 500, 503)
}

_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    # Of pictures only the empty one of the tab, in place of one that browsers ask a server for.
    "connect-src 'self'; img-src data:"
)


def create_app(llm: LLM, settings: ServeSettings) -> Served:
    """The routes of `llm`. Local.

    Args:
        llm: The model, which nothing else uses while the application runs.
        settings: Limits, and the name of the model.
    """
    service = Service(llm, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="pcomm serve",
        version=__version__,
        lifespan=lifespan,
        # A client that follows no redirect of a POST gets an error that it can read.
        redirect_slashes=False,
        # Their pages load scripts from elsewhere; /openapi.json stays.
        docs_url=None,
        redoc_url=None,
    )
    _add_model_routes(app, service, llm)
    _add_state_routes(app, service)
    _add_errors(app)
    return Served(RequestLimits(app, service), service)


class Served:
    """An ASGI application and the service behind it.

    Attributes:
        app: Application for an ASGI server; its lifespan starts and stops the step loop.
        service: The model behind it.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service


def _add_model_routes(app: FastAPI, service: Service, llm: LLM) -> None:
    name, created = service.settings.model_name, int(time.time())
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pcomm",
        "max_model_len": llm.max_model_len,
        "has_chat_template": not llm.loaded.chat_stop,
        # As this server has them for requests without the fields: none are those of OpenAI's API.
        "default_sampling_params": dict(llm.defaults.fields),
    }

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    # A name may have slashes, as those of Hugging Face do.
    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model_card(model: str) -> dict[str, Any]:
        if model != name:
            raise no_such_model(model, name)
        return card


def _add_state_routes(app: FastAPI, service: Service) -> None:
    page = files("pcomm.integration.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/health", responses={503: {"model": dict[str, str]}})
    async def health() -> JSONResponse:
        is_well, reason = service.health()
        if not is_well:
            return JSONResponse({"status": reason}, status_code=503)
        return JSONResponse({"status": reason, "implementation": service.implementation})

    @app.get("/ready", responses={503: {"model": dict[str, str]}})
    async def ready() -> JSONResponse:
        is_ready, reason = service.readiness()
        return JSONResponse({"status": reason}, status_code=200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(await service.metrics_text(), headers={"Content-Type": kind})

    @app.get("/", response_class=HTMLResponse)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(PcommError)
    async def refused(_: Request, error: PcommError) -> Response:
        return error_response(api_error_of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = validation_error(
            error.errors(),
            body=error.body,
            path=request.url.path,
            content_type=request.headers.get("content-type"),
        )
        return error_response(found)

    routes = [
        f"{method} {one.path}"
        for one in app.routes
        if isinstance(one, APIRoute)
        for method in sorted(one.methods or ())
    ]

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
        if error.status_code == 400:
            # FastAPI raises this status for a body alone, which it could not read.
            return error_response(unreadable_body(error.__cause__))
        code = codes.get(error.status_code, "invalid_request")
        message = f"{error.detail}: {request.method} {request.url.path!r:.200}"
        headers = dict(error.headers or {})
        if error.status_code in (404, 405):
            message += f"; this server has {', '.join(routes)}."
        if error.status_code == 413:
            headers["Connection"] = "close"
        return error_response(ApiError(error.status_code, message, code=code, headers=headers))

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, error: ClientGoneError) -> Response:
        # It is never read; this is the status that logs have for it.
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_response(api_error_of(error))


class RequestLimits:
    """ASGI middleware that refuses requests for a text which cannot be taken, and counts others.

    Args:
        app: The application behind it.
        service: Service that says whether texts are written now. Its settings have the key that
            requests to `/v1` show as `Authorization: Bearer KEY`, and the most bytes of a body.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._max_body_bytes = service.settings.max_body_bytes
        key = service.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, is_text = Headers(scope=scope), False
        try:
            if scope["path"].startswith("/v1"):
                if self._key is not None:
                    self._check_key(self._key, headers.get("authorization", ""))
                is_text = scope["method"] == "POST"
            if is_text and (refusal := self._service.refusal()) is not None:
                raise refusal
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

        self._service.under_way += is_text
        try:
            await self._app(scope, counted, send)
        finally:
            self._service.under_way -= is_text

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
