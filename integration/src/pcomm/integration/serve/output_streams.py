"""From outputs of the engine to clients that wait, for as long as they are there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from pcomm.core.errors import PcommError
from pcomm.inference import Request, RequestOutput
from pcomm.integration.serve.api_error import ApiError, api_error_of, error_response
from pcomm.integration.serve.response_bodies import Reply, Usage
from pcomm.integration.serve.step_loop import StepLoop

__all__ = ["ClientGoneError", "EventStream", "OutputStreams", "unless_gone", "whole_answer"]

T = TypeVar("T")
Message = MutableMapping[str, Any]
_log = logging.getLogger("pcomm.serve")
_DONE = b"data: [DONE]\n\n"


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

    It begins with the first token: until then an error is an answer with a status of its own, which
    a client or a proxy can try again elsewhere. Later it is the last event.

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
                error = await unless_gone(receive, self._send_all(send))
                if error is not None:
                    await error_response(error)(scope, receive, send)
        finally:
            self._stream.close()

    async def _send_all(self, send: Send) -> ApiError | None:
        """Send the events; the error before the first of them is returned instead."""
        is_begun = False
        async for body in self._bodies():
            if isinstance(body, ApiError):
                if not is_begun:
                    return body
                # The status has been sent, so the error is an event, as in the OpenAI API.
                body = _event(body.content)
            if not is_begun:
                start = {"status": self.status_code, "headers": self.raw_headers}
                await self._send(send, {"type": "http.response.start", **start})
                is_begun = True
            part = {"type": "http.response.body", "body": body, "more_body": True}
            await self._send(send, part)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _send(self, send: Callable[[Message], Awaitable[None]], message: Message) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send(message)

    async def _bodies(self) -> AsyncIterator[bytes | ApiError]:
        """What is sent: all that is there at once in one body; an error is the last."""
        events = bytearray()
        try:
            while not self._stream.is_complete:
                for place, output in await self._stream.read():
                    if output.error is not None:
                        raise _failure(output.request_id, output.error)
                    self._usage.add(place, output)
                    for part in self._reply.chunks(place, output):
                        events += _event(part)
                if events:
                    yield bytes(events)
                    events.clear()
        except Exception as error:
            if events:
                yield bytes(events)
            yield api_error_of(error)
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGoneError(Exception):
    """The client has closed its connection, so that an answer would never be read."""


class OutputStreams:
    """All streams of a server; used in its event loop, but for `deliver`.

    Args:
        most_unread: Most tokens of one HTTP request that wait to be read by its client.
    """

    loop: StepLoop

    def __init__(self, most_unread: int) -> None:
        self._most_unread = most_unread
        self._streams: dict[str, OutputStream] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: StepLoop) -> None:
        """Take the running event loop for deliveries, and `loop` for requests."""
        self._event_loop, self.loop = asyncio.get_running_loop(), loop

    @property
    def num_open(self) -> int:
        """Number of requests whose outputs are awaited."""
        return len(self._streams)

    def open(self, requests: Sequence[Request]) -> OutputStream:
        """The outputs of requests that are submitted next; the caller closes it."""
        stream = OutputStream(self, requests)
        for request in requests:
            self._streams[request.request_id] = stream
        return stream

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Pass outputs on; called by the thread of the step loop."""
        assert self._event_loop is not None, "bound before the loop starts"
        # An event loop that is closed has no clients any more.
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(self._put, outputs)

    def fail_all(self, error: PcommError) -> None:
        """End all streams with an error."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    def forget(self, request_ids: Sequence[str] | dict[str, int]) -> None:
        """Drop what comes of these requests from now on."""
        for name in request_ids:
            self._streams.pop(name, None)

    def _put(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output, self._most_unread)


class OutputStream:
    """Outputs of the requests that one HTTP request has made; read by one task.

    Args:
        streams: The owner.
        requests: The requests, in the order of their answers.
    """

    def __init__(self, streams: OutputStreams, requests: Sequence[Request]) -> None:
        self._streams, self._requests = streams, requests
        self._places = {one.request_id: place for place, one in enumerate(requests)}
        self._running = set(self._places)
        self._unread: list[tuple[int, RequestOutput]] = []
        self._num_unread = 0
        self._error: PcommError | None = None
        self._news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether all requests have ended, without an error, and all was read."""
        return not self._running and not self._unread and self._error is None

    async def submit(self) -> None:
        """Give the requests to the engine, all of them or none.

        A caller that is cancelled in it closes the stream: the requests may have been accepted.

        Raises:
            PcommError: The engine refuses one of them, or has ended.
        """
        await asyncio.wrap_future(self._streams.loop.submit(self._requests))

    async def read(self) -> list[tuple[int, RequestOutput]]:
        """All outputs that were not read before, at least one, each with the place of its request.

        Raises:
            SlowReaderError: Too much was not read; the requests are over.
            ClosedError: The server is being stopped; the requests are over.
        """
        while not self._unread and self._error is None:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        found, self._unread, self._num_unread = self._unread, [], 0
        return found

    def close(self) -> None:
        """End what still runs, and free its memory; a second call does nothing."""
        self._streams.forget(self._places)
        if self._running:
            self._streams.loop.abort(sorted(self._running))
            self._running.clear()

    def put(self, output: RequestOutput, most_unread: int) -> None:
        """Take one output; called in the event loop.

        Args:
            output: Output of one of the requests.
            most_unread: Most tokens that wait to be read.
        """
        if output.finish_reason:
            self._running.discard(output.request_id)
        self._unread.append((self._places[output.request_id], output))
        self._num_unread += len(output.token_ids)
        if self._num_unread > most_unread:
            self.fail(
                SlowReaderError(
                    "the stream",
                    found=f"{self._num_unread} tokens that the client has not read",
                    why=f"At most {most_unread} are kept, so that memory has a bound.",
                    fix="Read the stream while it is written, or ask for fewer tokens.",
                )
            )
        self._news.set()

    def fail(self, error: PcommError) -> None:
        """End with an error instead of more outputs."""
        self._error, self._unread = error, []
        self._news.set()
        self.close()


class SlowReaderError(PcommError):
    """A client did not read its text while it was written, and too much of it waits."""
