"""One thread that owns an engine: requests come in through a queue, outputs go out in batches."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from pcomm.core.errors import ClosedError
from pcomm.inference import Request, RequestOutput
from pcomm.integration.llm.open_requests import StepEngine

__all__ = ["StepLoop", "StepObserver"]

T = TypeVar("T")


class StepObserver(Protocol):
    """What is told of requests, always by the thread of the loop."""

    def added(self, request: Request) -> None:
        """A request was accepted."""
        ...

    def stepped(self, outputs: Sequence[RequestOutput]) -> None:
        """A step has given outputs."""
        ...

    def aborted(self, request_id: str) -> None:
        """A request was ended before it was complete."""
        ...


class StepLoop:
    """Steps an engine while it has work, in a thread of its own.

    No other thread may call the engine between `start` and the end of `close`.

    Args:
        engine: The engine; the loop does not close it.
        deliver: Called by the thread with the outputs of a step; returns at once and does not
            raise.
        observer: Is told of all requests; None for none.
        clock: Seconds that only grow, for `busy_s`.

    Attributes:
        error: The exception by which the loop has ended; None while it is well.
    """

    def __init__(
        self,
        engine: StepEngine,
        deliver: Callable[[Sequence[RequestOutput]], None],
        *,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._deliver, self._observer = engine, deliver, observer
        self._clock = clock
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._commands = queue.SimpleQueue()
        self._live: set[str] = set()
        # Guards what says that the loop has ended, so that no command is left without an answer.
        self._lock = threading.Lock()
        self._is_closing = False
        self._busy_since: float | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine steps", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """Seconds since the step or call under way began; 0 between two of them."""
        since = self._busy_since
        return 0.0 if since is None else max(self._clock() - since, 0.0)

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: started, and neither closed nor failed."""
        return self._thread.is_alive() and self.error is None and not self._is_closing

    def submit(self, requests: Sequence[Request]) -> Future[None]:
        """Add requests, all of them or none.

        Returns:
            A future without a value; its exception is that of `Engine.add`, or a `ClosedError`.
        """
        return self.call(lambda: self._add(requests))

    def abort(self, request_ids: Sequence[str]) -> Future[None]:
        """End requests and free their memory; those that have ended are left out."""
        return self.call(lambda: self._abort(request_ids))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a short function in the thread of the loop, between two steps.

        Returns:
            A future with what it returns or raises; a `ClosedError` once the loop has ended.
        """
        future: Future[T] = Future()
        with self._lock:
            if not self._is_closing and self.error is None:
                self._commands.put((function, future))
                return future
        future.set_exception(_closed(self.error))
        return future

    def close(self, timeout_s: float | None = None) -> bool:
        """End the thread after the step under way, and abort all requests.

        Args:
            timeout_s: Seconds to wait for it; None for no limit.

        Returns:
            False if the step has not returned in time; the thread then ends with the process.
        """
        with self._lock:
            if not self._is_closing and self.error is None:
                self._is_closing = True
                self._commands.put((lambda: self._abort(list(self._live)), Future()))
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not (self._is_closing and self._commands.empty()):
                self._answer(block=not self._engine.has_work)
                if self._engine.has_work and not self._is_closing:
                    self._step()
        except BaseException as error:  # all that a step can raise ends the loop, and is shown
            with self._lock:
                self.error = error
            self._end_all(error)
        self._refuse_rest()

    def _answer(self, *, block: bool) -> None:
        """Run the commands that wait; with `block`, wait for one."""
        while True:
            try:
                function, future = self._commands.get(block=block)
            except queue.Empty:
                return
            block = False
            if not future.set_running_or_notify_cancel():
                # The client that asked is gone: nothing is added for it, and what it wanted to be
                # ended is ended by the call after this one.
                continue
            self._busy_since = self._clock()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            finally:
                self._busy_since = None

    def _step(self) -> None:
        self._busy_since = self._clock()
        try:
            outputs = self._engine.step()
        finally:
            self._busy_since = None
        for output in outputs:
            if output.finish_reason:
                self._live.discard(output.request_id)
        if self._observer is not None:
            self._observer.stepped(outputs)
        if outputs:
            self._deliver(outputs)

    def _add(self, requests: Sequence[Request]) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self._engine.add(request)
                added.append(request.request_id)
        except BaseException:
            for name in added:
                self._engine.abort(name)
            raise
        self._live.update(added)
        if self._observer is not None:
            for request in requests:
                self._observer.added(request)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if name in self._live:
                self._live.discard(name)
                self._engine.abort(name)
                if self._observer is not None:
                    self._observer.aborted(name)

    def _end_all(self, error: BaseException) -> None:
        cause = error if isinstance(error, Exception) else RuntimeError(repr(error))
        ended = [
            RequestOutput(name, (), finish_reason="error", error=cause)
            for name in sorted(self._live)
        ]
        self._live.clear()
        if self._observer is not None:
            self._observer.stepped(ended)
        self._deliver(ended)

    def _refuse_rest(self) -> None:
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(_closed(self.error))


def _closed(error: BaseException | None) -> ClosedError:
    return ClosedError(
        "StepLoop",
        found="a loop that has ended" if error is None else f"{type(error).__name__}: {error}",
        why="No step is made any more, so a request would wait for ever.",
        fix="Start the server again." if error is None else "Start the server again; see its log.",
    )
