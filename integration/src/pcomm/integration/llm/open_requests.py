"""Requests whose outputs are read: the engine behind them, what waits, and what comes out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pcomm.core.errors import UnsupportedError
from pcomm.core.process import deferred_interrupt
from pcomm.inference import Request, RequestOutput
from pcomm.inference.engine import EngineStats, FinishReason
from pcomm.inference.sampling import TokenLogprobs

__all__ = ["Delta", "Generation", "OpenRequests", "StepEngine", "claim", "joined"]


@dataclass(frozen=True)
class Delta:
    """What became certain of a text with one step.

    Attributes:
        text: Text that no later token changes; may be empty.
        token_ids: Tokens of the step, an end token included.
        logprobs: One entry for each token, where the settings ask for them.
        finish_reason: None until the text ends.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Generation:
    """A text that has ended.

    Attributes:
        prompt_ids: Tokens that were continued.
        text: Text behind the prompt; without a stop string.
        token_ids: Tokens that were written; an end token, if one came, is the last.
        finish_reason: `stop`, `length`, `abort` (by `LLM.abort`) or `error`.
        logprobs: One entry for each written token, where the settings ask for them.
        prompt_logprobs: One entry for each token of the prompt but the first, likewise.
        cached_tokens: Number of tokens of the prompt that the prefix cache had.
        error: The exception that ended the text, with `finish_reason` `error`.
    """

    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    error: Exception | None = None


def joined(prompt: tuple[int, ...], outputs: Sequence[RequestOutput]) -> Generation:
    """All outputs of one request as one text. Local.

    Args:
        prompt: Tokens of its prompt.
        outputs: Outputs of the engine for it, in order; the last one has a `finish_reason`, unless
            the request was aborted.
    """
    last = outputs[-1] if outputs else None
    return Generation(
        prompt_ids=prompt,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=(last.finish_reason if last else None) or "abort",
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
        cached_tokens=max((output.cached_tokens for output in outputs), default=0),
        error=last.error if last else None,
    )


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


def claim(callers: dict[str, threading.Thread], what: str) -> None:
    """Begin a call that one thread at a time may make. Local.

    The owner of the mapping puts an empty one in its place when the call ends. An interrupt right
    after `claim` leaves the claim to its thread, whose next call ends it.

    Args:
        callers: An empty mapping, or that of a call under way.
        what: The object that is called, for the error.

    Raises:
        UnsupportedError: Another thread is within a call.
    """
    # One operation for all threads: the first one gets its entry.
    owner = callers.setdefault("caller", threading.current_thread())
    if owner is not threading.current_thread():
        raise UnsupportedError(
            f"{what}: a call in thread {threading.current_thread().name!r}",
            found=f"a call under way in thread {owner.name!r}",
            why="Requests belong to the thread that reads their texts, which makes the steps.",
            fix="Call it from one thread at a time, with a lock; or use `pcomm serve`, which has "
            "a thread of its own for the steps.",
        )


class StepEngine(Protocol):
    """The methods of `pcomm.inference.Engine`, with the same meaning and errors."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or to raise."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens of the requests under way."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request; its memory is free after the call."""
        ...

    def stats(self) -> EngineStats:
        """Counters and the use of memory; on ranks those of the first one."""
        ...

    def close(self) -> None:
        """End all requests and free all memory."""
        ...
