"""Outputs of the engine on their way to the clients that wait for them, in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from pcomm.core.errors import PcommError
from pcomm.inference import Request, RequestOutput
from pcomm.integration.serve.step_loop import StepLoop

__all__ = ["OutputStream", "OutputStreams", "SlowReaderError"]


class SlowReaderError(PcommError):
    """A client did not read its text while it was written, and too much of it waits."""


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
