"""One thread that owns an engine: requests come in, outputs go out, and ranks begin anew."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, runtime_checkable

from pcomm.core.errors import ClosedError, PcommError
from pcomm.inference import Request, RequestOutput
from pcomm.integration.llm.open_requests import StepEngine

__all__ = ["EngineWithRanks", "StepLoop", "StepObserver"]

T = TypeVar("T")
_log = logging.getLogger("pcomm.serve")

# How long a loop without work waits until it looks whether a rank has died.
_LOOK_S = 0.1
# The longest pause before a restart, and how long ranks live whose death is not one of a series.
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0


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


@runtime_checkable
class EngineWithRanks(Protocol):
    """What an engine has besides that consists of processes, which may die."""

    @property
    def failure(self) -> str:
        """The reason why no step can be made any more; empty while it can. From any thread."""
        ...

    def restart(self) -> None:
        """Start new ranks; `close`, from another thread, cuts it short."""
        ...


class StepLoop:
    """Steps an engine while it has work, in a thread of its own.

    No other thread may call the engine between `start` and the end of `close`. When a step raises,
    all requests end with its error. An engine that is an `EngineWithRanks` then gets new ranks, as
    often as `restarts` says; until they are there nothing is taken. The first restart comes at
    once, and each further one of a series after a pause twice as long as that before.

    Args:
        engine: The engine; the loop closes it if it is closed itself during a restart.
        deliver: Function that the thread calls with the outputs of a step; it returns at once and
            does not raise.
        observer: Object that is told of all requests; None for none.
        clock: Seconds that only grow, for `busy_s` and the pauses.
        restarts: How often the ranks of the engine are started again.
        restart_pause_s: Seconds before the second restart of a series.

    Attributes:
        error: The exception of the step that has ended all requests; None while all is well.
        is_restarting: Whether that is answered by new ranks.
        num_restarts: How often they were started, or tried to.
    """

    def __init__(
        self,
        engine: StepEngine,
        deliver: Callable[[Sequence[RequestOutput]], None],
        *,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        restarts: int = 0,
        restart_pause_s: float = 1.0,
    ) -> None:
        self._engine, self._deliver, self._observer = engine, deliver, observer
        self._with_ranks = engine if isinstance(engine, EngineWithRanks) else None
        self._clock, self._most_restarts, self._pause_s = clock, restarts, restart_pause_s
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._commands = queue.SimpleQueue()
        self._live: set[str] = set()
        # Guards what says that the loop has ended, so that no command is left without an answer.
        self._lock = threading.Lock()
        self._is_closing = False
        self._ends = threading.Event()
        self._busy_since: float | None = None
        self._well_since, self._in_series = clock(), 0
        self.error: BaseException | None = None
        self.is_restarting, self.num_restarts = False, 0
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

    @property
    def is_lost(self) -> bool:
        """Whether no request will be taken any more, since a step has failed."""
        with self._lock:
            return self.error is not None and not self.is_restarting

    @property
    def reason(self) -> str:
        """What has failed, and what is done about it, for a person; empty while all is well."""
        with self._lock:
            error, is_restarting, number = self.error, self.is_restarting, self.num_restarts
        if error is None:
            return ""
        # What a program of ours raised may name values of requests.
        found = error.found if isinstance(error, PcommError) else type(error).__name__
        return f"{found}; restart {number} of {self._most_restarts}" if is_restarting else found

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
                self._commands.put((lambda: self._abort(list(self._live)), Future()))
            self._is_closing = True
            self._ends.set()
            is_restarting = self.is_restarting
        if is_restarting:
            self._engine.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                while not (self._is_closing and self._commands.empty()):
                    self._answer(block=not self._has_work())
                    if self._has_work() and not self._is_closing:
                        self._step()
                break
            except BaseException as error:  # all that a step can raise is shown to all
                self._fail(error)
                self._end_all(error)
            if not self._is_restarted():
                break
        self._refuse_rest()

    def _has_work(self) -> bool:
        """Whether `step` has something to do, or to raise: the death of a rank of an idle one."""
        return self._engine.has_work or bool(self._with_ranks and self._with_ranks.failure)

    def _fail(self, error: BaseException) -> None:
        """Note an error, and in the same moment whether a restart answers it."""
        with self._lock:
            is_left = self._with_ranks is not None and self.num_restarts < self._most_restarts
            self.error, self.is_restarting = error, is_left and not self._is_closing
            self.num_restarts += self.is_restarting
        # The words of one of ours say all; others are told where they were raised.
        cause = None if isinstance(error, PcommError) else error
        _log.error("the model has failed: %s", self.reason, exc_info=cause)

    def _is_restarted(self) -> bool:
        """Start new ranks until they are there, or no restart is left."""
        if self._clock() - self._well_since > _STEADY_S:
            self._in_series = 0
        while self.is_restarting:
            assert self._with_ranks is not None
            pause_s = self._pause_s * 2.0 ** min(self._in_series - 1, 20) if self._in_series else 0
            self._in_series += 1
            if self._ends.wait(min(pause_s, _LONGEST_PAUSE_S)):
                break
            try:
                self._with_ranks.restart()
            except Exception as error:
                if self._is_closing:
                    break
                self._fail(error)
                continue
            with self._lock:
                self.error, self.is_restarting = None, False
                self._well_since = self._clock()
            _log.warning("the model is there again, after restart %s", self.num_restarts)
            return True
        return False

    def _answer(self, *, block: bool) -> None:
        """Run the commands that wait; with `block`, wait a moment for one."""
        while True:
            try:
                function, future = self._commands.get(block, _LOOK_S if self._with_ranks else None)
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
        "the request",
        found="a server that is being stopped" if error is None else "a model that has failed",
        why="No step is made for it, so it would wait for ever.",
        fix="Send it again later.",
    )
