"""From the outputs of the engine to an HTTP answer, for as long as its client is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from pcomm.inference import RequestOutput
from pcomm.integration.serve.api_error import ApiError, api_error_of
from pcomm.integration.serve.output_streams import OutputStream
from pcomm.integration.serve.replies import Reply
from pcomm.integration.serve.usage import Usage

__all__ = ["ClientGoneError", "EventStream", "unless_gone", "whole_answer"]

T = TypeVar("T")
Message = MutableMapping[str, Any]

_log = logging.getLogger("pcomm.serve")
_DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client has closed its connection, so that an answer would never be read."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled when the client leaves.

    Args:
        receive: The channel of the request, whose body has been read.
        work: Awaitable that may be cancelled at any time.

    Raises:
        ClientGoneError: The client has left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def whole_answer(
    stream: OutputStream, reply: Reply, usage: Usage, num_texts: int
) -> dict[str, Any]:
    """The JSON of a request without `stream`; the caller closes `stream`.

    Args:
        stream: Outputs of the request.
        reply: Maker of the JSON.
        usage: Usage of the request, which is counted here.
        num_texts: Number of texts.

    Raises:
        ApiError: One of the texts has failed.
    """
    texts: list[list[RequestOutput]] = [[] for _ in range(num_texts)]
    while not stream.is_complete:
        for place, output in await stream.read():
            if output.error is not None:
                raise _failure(output.request_id, output.error)
            usage.add(place, output)
            texts[place].append(output)
    return reply.whole(texts, usage)


class EventStream(Response):
    """A stream of server-sent events, ended when its client leaves or stops reading.

    Args:
        stream: Outputs of the request; closed with the answer.
        reply: Maker of the parts.
        usage: Usage of the request, which is counted here.
        has_usage: True to end with a part that has the usage.
        write_timeout_s: Seconds that the client may leave one part unread before it is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: OutputStream,
        reply: Reply,
        usage: Usage,
        *,
        has_usage: bool,
        write_timeout_s: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # `Response` says how long its empty body is.
        del self.headers["content-length"]
        self._stream, self._reply, self._usage = stream, reply, usage
        self._has_usage, self._write_timeout_s = has_usage, write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            with contextlib.suppress(ClientGoneError, TimeoutError, OSError):
                await unless_gone(receive, self._send_all(send))
        finally:
            self._stream.close()

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await self._send(send, {"type": "http.response.start", **start})
        async for body in self._bodies():
            part = {"type": "http.response.body", "body": body, "more_body": True}
            await self._send(send, part)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Callable[[Message], Awaitable[None]], message: Message) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send(message)

    async def _bodies(self) -> AsyncIterator[bytes]:
        """What is sent: all that is there at once in one body."""
        try:
            while not self._stream.is_complete:
                events = bytearray()
                for place, output in await self._stream.read():
                    if output.error is not None:
                        raise _failure(output.request_id, output.error)
                    self._usage.add(place, output)
                    for part in self._reply.chunks(place, output):
                        events += _event(part)
                if events:
                    yield bytes(events)
        except Exception as error:
            # The status has been sent, so the error is an event, as in the OpenAI API.
            yield _event(api_error_of(error).content)
            return
        if self._has_usage:
            yield _event(self._reply.usage_chunk(self._usage))
        yield _DONE


def _failure(request_id: str, error: Exception) -> ApiError:
    """The answer for a request that the engine has ended; a fault of the server is logged."""
    found = api_error_of(error)
    if found.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("request %s failed", request_id, exc_info=error)
    return found


def _event(part: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(part, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
