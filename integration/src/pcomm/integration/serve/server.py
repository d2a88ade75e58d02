"""The HTTP server: a socket, uvicorn, and an end that is orderly."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any, TextIO
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcomm.core.errors import ConfigError
from pcomm.integration.serve.app import Served

__all__ = ["AccessLog", "bind", "listen", "serve"]

# What clients get who are told that the server stops, before their connections are cut.
_GOODBYE_S = 2.0
# How often it is looked whether they have all ended.
_LOOK_S = 0.02
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet, so that clients are refused. Local.

    Args:
        host: Address or name.
        port: Port; 0 for any that is free.

    Raises:
        ConfigError: The address is not of this machine, or in use.
    """
    with _told(f"{host} port {port}"):
        # The system would take the rest of a division by 65,536.
        if not 0 <= port < 2**16:
            raise OverflowError("a port is a number from 0 to 65535")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    return bound


def listen(bound: socket.socket) -> str:
    """Let clients connect; they wait until `serve`. Local.

    Returns:
        The address for clients.

    Raises:
        ConfigError: Another server has begun to listen there.
    """
    url = _url(bound)
    with _told(url):
        bound.listen(_BACKLOG)
    return url


def _url(bound: socket.socket) -> str:
    """The address of a socket for clients. Local."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(served: Served, bound: socket.socket, *, access_log: TextIO | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until the model is lost. Local; in the main thread.

    At a signal `/ready` fails first, and new requests are answered with 503, while those under way
    have `shutdown_s` to end; the port is open until they have. After that clients are told, and
    the memory of their requests is free. A second SIGINT does not wait.

    Args:
        served: The application.
        bound: A socket that listens; closed at the end.
        access_log: Stream that gets a line for each request, see `AccessLog`; None for none.
    """
    limit_s = served.service.settings.shutdown_s
    config = uvicorn.Config(
        served.app if access_log is None else AccessLog(served.app, access_log),
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=int(_GOODBYE_S) + 1,
    )
    with bound, _ignored_afterwards():
        _Server(config, served, limit_s).run(sockets=[bound])


class AccessLog:
    """ASGI middleware that writes what was asked, and what it cost, but nothing of a text.

    A line is written when an answer has ended: time, method, path without the query, status (499
    for a client that left before it), seconds, and of what the engine has done the numbers of
    tokens and the id of the answer, which `-` stands for elsewhere.

    Args:
        app: The application behind it.
        file: File of the lines; nothing is written to one that is closed.
    """

    def __init__(self, app: ASGIApp, file: TextIO) -> None:
        self._app, self._file = app, file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 499
        # What a request leaves in its `state` is found here.
        state: dict[str, Any] = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            usage = state["usage"].to_json() if "usage" in state else {}
            fields = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "method": scope["method"],
                # Quoted, so that no path begins a line of its own.
                "path": quote(scope["path"]),
                "status": status,
                "seconds": f"{time.perf_counter() - begun:.3f}",
                "prompt_tokens": usage.get("prompt_tokens", "-"),
                "completion_tokens": usage.get("completion_tokens", "-"),
                "request_id": state.get("request_id", "-"),
            }
            line = " ".join(f"{name}={value}" for name, value in fields.items())
            with suppress(OSError, ValueError):
                print(line, file=self._file, flush=True)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, served: Served, limit_s: float) -> None:
        super().__init__(config)
        self._served, self._limit_s = served, limit_s

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn; also ends when no request will be answered any more."""
        return await super().on_tick(counter) or self._served.service.loop.is_lost

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Let requests end until the limit, then tell their clients, and close the port."""
        service, loop = self._served.service, asyncio.get_running_loop()
        service.drain()
        limit_s = 0.0 if service.loop.is_lost else self._limit_s
        late = loop.call_later(limit_s, service.end_requests)
        end = loop.time() + limit_s + _GOODBYE_S
        try:
            while service.under_way and not self.force_exit and loop.time() < end:
                await asyncio.sleep(_LOOK_S)
            await super().shutdown(sockets=list(sockets or ()))
        finally:
            late.cancel()


@contextmanager
def _told(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"pcomm serve: {address}",
            found=f"{error}",
            why="The server needs an address of this machine that nothing else uses.",
            fix="Give another --port, 0 for any that is free, or another --host.",
        ) from error


@contextmanager
def _ignored_afterwards() -> Iterator[None]:
    """Take the signal that uvicorn raises again after it has ended in order."""

    def ended(number: int, frame: FrameType | None) -> None:
        pass

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, ended) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
