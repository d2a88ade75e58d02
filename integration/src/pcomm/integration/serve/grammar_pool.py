"""Compiles the grammars of requests in threads of their own, so that no step waits for one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from pcomm.core.errors import ConfigError, PcommError
from pcomm.inference import SamplingParams
from pcomm.inference.engine import QueueFullError
from pcomm.inference.sampling import CompiledGrammar, GrammarCompiler

__all__ = ["GrammarPool"]

_log = logging.getLogger("pcomm.serve")

Key = tuple[str | None, str | None, str | None]


class _Job:
    """One grammar, and how many requests wait for it."""

    def __init__(self) -> None:
        self.result: asyncio.Future[CompiledGrammar | None] = asyncio.Future()
        self.num_waiting = 0
        # True once a thread compiles it: that cannot be stopped, and keeps its place.
        self.is_begun = False
        self.work: asyncio.Task[None]


class GrammarPool:
    """Grammars for a server; used in its event loop.

    Requests that ask for equal grammars wait for one compilation. Without a request that waits for
    it, it does not begin; one that has begun goes on, keeps its place, and serves later requests.

    Args:
        compiler: Compiler of grammars, which may be called in any thread.
        max_compiling: Most grammars that are compiled at once.
        max_waiting: Most others that wait for that.
        limit_s: Seconds after which a request is refused whose grammar is not there.
    """

    def __init__(
        self, compiler: GrammarCompiler, *, max_compiling: int, max_waiting: int, limit_s: float
    ) -> None:
        self._compiler = compiler
        self._places = asyncio.Semaphore(max_compiling)
        self._most, self._limit_s = max_compiling + max_waiting, limit_s
        self._jobs: dict[Key, _Job] = {}

    @property
    def num_jobs(self) -> int:
        """Number of grammars that are compiled or wait for it."""
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a grammar."""
        return sum(job.num_waiting for job in list(self._jobs.values()))

    async def load(self) -> None:
        """Load what all grammars need, before the first client comes.

        Where that fails the first request with a grammar has the error, and others are served.
        """
        try:
            await asyncio.to_thread(self._compiler.load)
        except Exception as error:
            _log.warning("no text can follow a grammar: %s", error)

    async def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar of some settings; None for settings without one. May be cancelled.

        Raises:
            QueueFullError: Too many grammars wait, or it did not begin within the limit.
            ConfigError: It cannot be compiled, or not within the limit.
            UnsupportedError: No grammar can be compiled here.
        """
        key = (params.json_schema, params.regex, params.grammar)
        if not any(text is not None for text in key):
            return None
        if (kept := self._compiler.kept(params)) is not None:
            return kept
        job = self._jobs.get(key) or self._new_job(key, params)
        job.num_waiting += 1
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.shield(job.result)
        except TimeoutError:
            raise self._too_late(job) from None
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.is_begun and not job.result.done():
                self._forget(key, job)
                job.work.cancel()

    def fail_all(self, error: PcommError) -> None:
        """End the waiting of all requests with an error."""
        for job in list(self._jobs.values()):
            if not job.result.done():
                job.result.set_exception(error)

    def _new_job(self, key: Key, params: SamplingParams) -> _Job:
        if len(self._jobs) >= self._most:
            raise _busy(f"{len(self._jobs)} grammars are compiled or wait for it")
        job = self._jobs[key] = _Job()
        # Without this an error without a request that waits would be in the log.
        job.result.add_done_callback(lambda done: done.cancelled() or done.exception())
        job.work = asyncio.ensure_future(self._work(key, job, params))
        return job

    async def _work(self, key: Key, job: _Job, params: SamplingParams) -> None:
        try:
            async with self._places:
                if job.result.done():
                    return
                job.is_begun = True
                grammar = await _in_thread(lambda: self._compiler.compile(params))
                if not job.result.done():
                    job.result.set_result(grammar)
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(error)
        finally:
            self._forget(key, job)

    def _forget(self, key: Key, job: _Job) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]

    def _too_late(self, job: _Job) -> PcommError:
        if not job.is_begun:
            return _busy(f"no grammar has begun to be compiled for {self._limit_s:g} s")
        return ConfigError(
            "SamplingParams: grammar",
            found=f"a grammar that is not compiled after {self._limit_s:g} s",
            why="Schemas that combine many patterns take time that doubles with each of them.",
            fix="Give a simpler schema, with fewer `pattern` under one `allOf`.",
        )


def _busy(found: str) -> QueueFullError:
    return QueueFullError(
        "the request",
        found=found,
        why="Few are compiled at once, so that those who write text are not slowed down.",
        fix="Try again later.",
    )


async def _in_thread(work: Callable[[], CompiledGrammar | None]) -> CompiledGrammar | None:
    """What `work` returns or raises, from a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[CompiledGrammar | None] = loop.create_future()

    def settle(result: CompiledGrammar | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        # The event loop may be closed, after which no request waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="grammar", daemon=True).start()
    return await future
