"""An engine on several ranks, as its caller sees it: one message a call, one answer for all."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from pcomm.core.errors import ClosedError, ConfigError, DivergenceError, PcommError, PeerError
from pcomm.core.process import Answer, LocalRanks, RankError
from pcomm.inference import Request, RequestOutput
from pcomm.inference.engine import EngineStats
from pcomm.integration.llm.engine_size import EngineOptions, rank_bytes
from pcomm.integration.llm.open_requests import claim
from pcomm.integration.llm.rank_engine import MEET, serve_engine

__all__ = ["EngineOnRanks"]

_PRELOADED = ("pcomm.integration.llm.rank_engine", "torch._dynamo", "torch.distributed.checkpoint")

# How long the ranks may take for the one collective after a step that failed on all of them.
_MEETING_S = 10.0


@dataclass(frozen=True)
class PendingCall:
    """A call whose result was not taken yet.

    Attributes:
        number: Number of its message; the session has sent as many messages if this one was sent.
        method: Name of the method, or `MEET`.
        arguments: Arguments of the method.
        is_owed: True for a call that is sent although the caller no longer waits for it.
        cause: Error of the step that a meeting follows; None for another call.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    is_owed: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True)
class Leftover:
    """What the next call finds: replaced by one assignment, so that an interrupt cuts nothing.

    Attributes:
        pending: Call to be finished first; None for none.
        outputs: Outputs of steps that were not handed over yet.
    """

    pending: PendingCall | None = None
    outputs: list[RequestOutput] = field(default_factory=list)


NOTHING_LEFT = Leftover()
"""No call and no outputs."""


class EngineOnRanks:
    """A model that `ranks` processes of this machine share, each with an engine; a `StepEngine`.

    Every call goes to all ranks as one message, in one order, and is answered by all. The engines
    decide alike, since they are deterministic and have the same calls and the same logits; replies
    carry a digest of what was decided, and another one is an error, not another text. This process
    takes part in no collective, so it does not hang with a rank that died or failed alone.
    `restart` puts new ranks in the place of those that were lost.

    An interrupt comes before a message is sent or while the answers are waited for. The next call
    finishes what it has left, from the number of messages that were sent. One thread calls at a
    time; only `failure` may be read, and `restart` be cut short by `close`, from others.

    Args:
        path: Folder of the model.
        ranks: Number of ranks, which can share the model.
        dtype: Dtype of the weights; None for that of the folder.
        quantization: Form of the weights as for `load_model`.
        device: `cpu`; or `cuda`, with a device for each rank.
        memory_bytes: Bytes for keys, values and states on all ranks together; None for a share of
            what is free.
        options: Options of the engine.

    Raises:
        ConfigError: The folder or an option cannot be used, or there are too few devices.
        PeerError: A rank has ended while it loaded the model.
    """

    def __init__(
        self,
        path: Path,
        *,
        ranks: int,
        dtype: torch.dtype | None,
        quantization: str | None,
        device: torch.device,
        memory_bytes: int | None,
        options: EngineOptions,
    ) -> None:
        _check_device(device, ranks)
        self._what = f"LLM({str(path)!r}, ranks={ranks})"
        self._task = (path.resolve(), dtype, quantization, device, options)
        self._memory_bytes = memory_bytes
        self._is_closed = self._is_lost = self._has_work = False
        self._left = Leftover()
        self._callers: dict[str, threading.Thread] = {}
        self._start(ranks)

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits, or the ranks are lost, so that `step` raises."""
        if self._is_closed:
            return False
        return bool(self._has_work or self._is_lost or self._left.pending or self._left.outputs)

    @property
    def failure(self) -> str:
        """The reason why no step can be made any more; empty while it can. From any thread."""
        return "" if self._is_closed else self._session.failure

    def restart(self) -> None:
        """Start new ranks, which load the model; requests, caches and counters begin anew.

        Raises:
            ClosedError: `close` was called, before or meanwhile.
            PeerError: A rank has ended while it loaded the model; `restart` may be called again.
        """
        self._check_open("restart")
        self._ranks.close()
        self._has_work, self._left = False, Leftover()
        # Until they are there, a call says that the ranks are lost.
        self._is_lost = True
        try:
            self._start(self._ranks.size)
        except Exception:
            # Ranks that `close` has ended meanwhile fail in ways of their own.
            self._check_open("restart")
            raise
        self._is_lost = False

    def add(self, request: Request) -> None:
        """Queue a request on all ranks; see `Engine.add`."""
        self._check_open("add")
        self._call("add", request)

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens; see `Engine.step`.

        An interrupt loses none: the next call returns what was computed. Outputs are handed over
        with the last line, where Python looks for no signal. From then on they are the caller's.

        Raises:
            PeerError: A rank died, or failed while the others did not.
            DivergenceError: The ranks have decided differently.
            UnsupportedError: Another thread is within a call; so for all calls.
        """
        self._check_open("step")
        self._call("step")
        # Python looks for signals at calls: nothing comes between these lines.
        outputs, self._left = self._left.outputs, NOTHING_LEFT
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request on all ranks; see `Engine.abort`. Local once the ranks are lost."""
        if self._is_closed or self._session.failure:
            return False
        return bool(self._call("abort", request_id))

    def stats(self) -> EngineStats:
        """Counters of the first rank; sizes in bytes are those of one rank."""
        self._check_open("stats")
        found: EngineStats = self._call("stats")
        return found

    def close(self) -> None:
        """End all requests and all ranks; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._left.pending is None:
            self._session.close()
        self._ranks.close()

    def _start(self, size: int) -> None:
        """Start ranks that load the model, and tell them how much memory they may take."""
        _, _, _, device, _ = self._task
        threads = max(1, (os.cpu_count() or 1) // size)
        self._ranks = LocalRanks(size, threads=threads, preload=_PRELOADED, imports_main=False)
        try:
            # A `close` from another thread has ended either these ranks, or those before.
            self._check_open("restart")
            self._session = self._ranks.open(serve_engine, self._task)
            free = min(answer.value for answer in self._session.answers())
            self._session.ask(rank_bytes(device, self._memory_bytes, free, ranks=size))
        except RankError as error:
            self._ranks.close()
            if isinstance(error.error, PcommError):
                raise error.error from error
            raise self._lost(error) from error
        except BaseException:
            self._ranks.close()
            raise

    def _call(self, method: str, *arguments: Any) -> Any:
        """The result of a call on all ranks; the outputs of a step are left for `step`."""
        claim(self._callers, self._what)
        try:
            self._settle()
            if method == "step" and self._left.outputs:
                return None
            self._left = Leftover(self._next(method, *arguments), self._left.outputs)
            return self._finish()
        finally:
            # Not a call, at which an interrupt could come after a request was added.
            self._callers = {}

    def _next(self, method: str, *arguments: Any, is_owed: bool = False) -> PendingCall:
        return PendingCall(self._session.num_sent + 1, method, arguments, is_owed)

    def _settle(self) -> None:
        """Finish or drop a call that an interrupt has left without its result."""
        pending = self._left.pending
        if pending is None:
            return
        if self._session.num_sent < pending.number and not pending.is_owed:
            self._left = Leftover(None, self._left.outputs)
            return
        try:
            self._finish(is_given_up=True)
        except Exception:
            # The call was given up, and its error with it.
            if self.failure:
                raise

    def _finish(self, *, is_given_up: bool = False) -> Any:
        """The result of the pending call, of which all ranks have said the same.

        With `is_given_up` a request that was added is taken back.
        """
        pending = self._left.pending
        assert pending is not None
        answers = self._answers_to(pending)
        error, reply = answers[0].error, answers[0].value
        self._has_work = reply.has_work
        outputs, follows = self._left.outputs, None
        if not reply.has_raised:
            if pending.method == "step":
                outputs = [*outputs, *reply.value]
                if error is not None:
                    follows = replace(self._next(MEET, is_owed=True), cause=error)
            elif pending.method == "add" and is_given_up:
                follows = self._next("abort", pending.arguments[0].request_id, is_owed=True)
        # The result of a call that is not followed is returned from here without another call, at
        # which an interrupt could come: a request is either added for the caller or pending.
        self._left = Leftover(follows, outputs)
        if follows is not None:
            self._finish()
        elif reply.has_raised:
            assert error is not None
            raise error
        return reply.value

    def _answers_to(self, pending: PendingCall) -> list[Answer]:
        """The answers to a call, which is sent unless it was; ranks that differ are lost."""
        try:
            if self._session.num_sent < pending.number:
                self._session.send((pending.method, pending.arguments))
            answers = self._session.answers(None if pending.cause is None else _MEETING_S)
        except RankError as error:
            self._fail(error if pending.cause is None else _within(pending.cause, error))
        if pending.cause is None:
            self._check_same(answers)
        # A meeting after a failed step: a rank or a message was left within another collective.
        elif answers[0].value.value != list(range(self._ranks.size)):
            self._fail(_within(pending.cause))
        return answers

    def _check_same(self, answers: Sequence[Answer]) -> None:
        digests = [answer.value.digest for answer in answers]
        has_error = [answer.error is not None for answer in answers]
        if len({*digests}) == len({*has_error}) == 1:
            return
        self._lose()
        other = next(
            rank
            for rank in range(len(answers))
            if (digests[rank], has_error[rank]) != (digests[0], has_error[0])
        )
        raise DivergenceError(
            self._what,
            found=f"rank {other} did something else than rank 0",
            why="All ranks make the same calls and have the same logits, so they write the same "
            "text; from here on they would wait for each other.",
            fix="Make a new LLM. Check that all devices are of one kind, and report how it came "
            "about.",
        )

    def _fail(self, error: RankError) -> NoReturn:
        self._lose()
        raise self._lost(error) from error

    def _lose(self) -> None:
        self._is_lost = True
        self._ranks.close()

    def _lost(self, error: RankError) -> PeerError:
        return PeerError(
            self._what,
            found=str(error).splitlines()[0],
            why="Each rank has a part of every layer, so no step can be made without all of them.",
            fix="Make a new LLM, and add the requests again. A rank that was killed may have "
            "been too large for the memory of this machine.",
        )

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ClosedError(
                f"Engine.{method}",
                found="a closed engine",
                why="close() has ended its ranks.",
                fix="Make a new LLM.",
            )


def _within(cause: BaseException, lost: RankError | None = None) -> RankError:
    words = f"a step failed within a collective: {type(cause).__name__}: {cause}"
    return RankError(words if lost is None else f"{words}\n{lost}", cause)


def _check_device(device: torch.device, ranks: int) -> None:
    if device.type != "cuda":
        return
    devices = torch.cuda.device_count()
    if device.index is None and ranks <= devices:
        return
    raise ConfigError(
        f"LLM: ranks={ranks} with device={str(device)!r}",
        found=f"{devices} CUDA devices" if device.index is None else "one device for all ranks",
        why="Each rank computes on a device of its own, from cuda:0 on.",
        fix="Give device='cuda', and no more ranks than there are devices.",
    )
