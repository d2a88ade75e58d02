"""The requests of an `LLM` that are read, and the outputs that wait for their readers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pcomm.core.process import deferred_interrupt
from pcomm.inference import Request, RequestOutput
from pcomm.inference.engine import EngineStats
from pcomm.integration.llm.caller import claim
from pcomm.integration.llm.step_engine import StepEngine

__all__ = ["OpenRequests"]


class OpenRequests:
    """Requests under way, each with the outputs that were not read yet.

    One thread calls at a time; a call of another one is an `UnsupportedError`. A Ctrl-C loses no
    output and leaves no request without a reader. An exception from the handler of another signal
    may, while `step` gives outputs to their requests, let one of them be given twice.

    Args:
        engine: The engine that makes the steps.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._outputs: dict[str, deque[RequestOutput]] = {}
        # Outputs of a step that no request has yet.
        self._undelivered: list[RequestOutput] = []
        # Requests without a reader, to be ended by the next call.
        self._given_up: deque[str] = deque()
        self._callers: dict[str, threading.Thread] = {}
        self._last_caller = threading.current_thread()

    def add(self, request: Request) -> None:
        """Queue a request; see `Engine.add`. Local."""
        name = request.request_id
        is_new = name not in self._outputs
        try:
            with self._calling():
                self._engine.add(request)
                self._outputs[name] = deque()
        except Exception:
            raise
        except BaseException:
            # An interrupt: the engine may have the request, and the caller does not know.
            if is_new:
                self._outputs.pop(name, None)
                self._given_up.append(name)
            raise

    def outputs_of(self, name: str) -> deque[RequestOutput] | None:
        """The outputs that wait for a reader, who takes them out; None for no such request."""
        return self._outputs.get(name)

    def step(self, names: Sequence[str]) -> None:
        """One step, unless a request of `names` has something to be read already. Local."""
        if any(self._outputs.get(name) for name in names):
            return
        with self._calling():
            if not self._undelivered:
                # Python looks for signals at calls: none comes before the outputs are kept here.
                self._undelivered = self._engine.step()
            with deferred_interrupt():
                for output in self._undelivered:
                    if (mine := self._outputs.get(output.request_id)) is not None:
                        mine.append(output)
                self._undelivered = []

    def abort(self, name: str) -> bool:
        """End a request; see `Engine.abort`. Local."""
        with self._calling():
            if self._outputs.pop(name, None) is None:
                return False
            return self._engine.abort(name)

    def forget(self, name: str) -> None:
        """End a request that has no reader any more, at the latest with the next call. Local."""
        if self._outputs.pop(name, None) is None:
            return
        self._given_up.append(name)
        # A stream that is dropped may end in any thread, also in the middle of a call.
        if not self._callers and self._last_caller is threading.current_thread():
            with self._calling():
                pass

    def stats(self) -> EngineStats:
        """State of the engine; see `Engine.stats`. Local."""
        with self._calling():
            return self._engine.stats()

    def close(self) -> None:
        """End all requests and close the engine. Local."""
        self._outputs.clear()
        self._undelivered.clear()
        self._given_up.clear()
        self._engine.close()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call of the engine, by one thread at a time; requests that were given up end first."""
        claim(self._callers, "LLM")
        try:
            self._last_caller = threading.current_thread()
            while self._given_up:
                self._engine.abort(self._given_up[0])
                self._given_up.popleft()
            yield
        finally:
            self._callers = {}
