"""A task that stays on local ranks and answers messages of the process that started it."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NoReturn

from pcomm.core.process.interrupts import deferred_interrupt
from pcomm.core.process.messages import Answer, End
from pcomm.core.process.rank_error import RankError, end_of
from pcomm.core.process.rank_process import Report

if TYPE_CHECKING:
    from pcomm.core.process.local_ranks import LocalRanks

__all__ = ["RankSession"]

# How long ranks may take to answer that one of them has met an exception: some wait for that one.
_GRACE_S = 10.0
# How long the ranks may take to end their task once it was told to end.
_ENDING_S = 2.0
# A signal that arrives right before a wait begins is acted on when the wait ends, so none is long.
_LONGEST_WAIT_S = 1.0


class RankSession:
    """One task on all ranks, which gets the same messages in the same order; see `LocalRanks.open`.

    Between messages the ranks wait without using the processor, and no collective is entered, so
    none can run into its time limit. The process that sends the messages takes part in no
    collective: a rank that dies or hangs is noticed here, and nothing here hangs with it.

    Once a rank is lost, all are stopped, and each further call raises the same error.

    Ctrl-C comes before a message is sent, or while the answers are waited for, and neither loses
    anything. A second one while bytes are sent or received ends the session, as does an exception
    of another signal's handler there; `failure` tells it at once.

    Attributes:
        num_sent: Number of messages that were sent. It grows together with the sending, so that
            a caller that was interrupted in `send` can tell whether the ranks got the message.
    """

    def __init__(
        self, ranks: LocalRanks, task: Callable[..., Any], args: Sequence[object] = ()
    ) -> None:
        self._ranks = ranks
        self.num_sent = 0
        self._answers: dict[int, Answer] = {}
        self._lost: Exception | None = None
        # The call that sends or receives bytes now, or that an exception has cut short.
        self._cut = ""
        ranks._start(task, args, is_session=True)

    @property
    def failure(self) -> str:
        """The reason why the ranks answer no more; empty while they do. Local, from any thread."""
        if self._lost is not None:
            return str(self._lost).splitlines()[0]
        if not self._ranks.is_usable:
            return "the ranks were stopped"
        for rank, process in enumerate(self._ranks._processes):
            try:
                sentinel = process.sentinel
            except ValueError:
                # Closed by another thread meanwhile.
                return "the ranks were stopped"
            if connection.wait([sentinel], 0):
                return f"rank {rank} of {self._ranks.size} died"
        return ""

    def send(self, message: object) -> None:
        """Send a message to all ranks; `answers` has what they say. The one before is answered.

        Raises:
            RankError: A rank was lost before.
        """
        payload = pickle.dumps(message)
        self._check()
        assert not self._missing, "each message is answered before the next one"
        with self._whole("send"):
            self._answers = {}
            self.num_sent += 1
            for rank_connection in self._ranks._connections:
                # A rank that is gone is found by `answers`, where its end is told.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    rank_connection.send_bytes(payload)

    def answers(self, timeout_s: float | None = None) -> list[Answer]:
        """What each rank says to the last message, or to the start, in rank order.

        An interrupt while it waits loses nothing: another call goes on waiting. After an answer
        with an error the other ranks have some seconds, since they may wait for that rank.

        Args:
            timeout_s: Seconds after which the ranks are stopped; None waits for ever.

        Raises:
            RankError: A rank raised, died or did not answer. All are stopped then.
        """
        self._check()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._missing:
            self._receive(deadline)
            failed = [rank for rank, one in self._answers.items() if one.error is not None]
            if failed and self._missing:
                grace = time.monotonic() + _GRACE_S
                deadline = grace if deadline is None else min(deadline, grace)
                self._wait_for_others(failed[0], deadline)
            elif self._missing and deadline is not None and time.monotonic() >= deadline:
                cause = f"ranks {self._missing} of {self._ranks.size} did not answer in time"
                self._lose(cause, running=self._missing)
        return [self._answers[rank] for rank in range(self._ranks.size)]

    def ask(self, message: object, timeout_s: float | None = None) -> list[Answer]:
        """`send`, then `answers`."""
        self.send(message)
        return self.answers(timeout_s)

    def close(self) -> None:
        """End the task on all ranks; they can be used again. Calling it again does nothing.

        Ranks that have not answered, or do not end soon, are stopped.
        """
        if not self._ranks.is_usable or self._lost is not None:
            return
        try:
            if not self._missing:
                self.send(End())
                # The reports of the tasks are read as `LocalRanks.run` reads them.
                self._ranks._collect(time.monotonic() + _ENDING_S)
                self._lost = RankError("This session is closed; open a new one.")
                return
        except RankError:
            # A rank that ends with an error, or late, has given its answers before.
            pass
        except BaseException:
            self._ranks.close()
            raise
        self._ranks.close()

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self._ranks.size) if rank not in self._answers]

    def _wait_for_others(self, failed: int, deadline: float) -> None:
        while self._missing:
            self._receive(deadline)
            if self._missing and time.monotonic() >= deadline:
                error = self._answers[failed].error
                self._lose(
                    f"rank {failed} of {self._ranks.size} failed alone: "
                    f"{type(error).__name__}: {error}",
                    error,
                    running=self._missing,
                )

    def _receive(self, deadline: float | None) -> None:
        """Wait for answers and ends of ranks, but not for long."""
        ranks = self._ranks
        left_s = _LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
        waited: dict[Any, int] = {ranks._connections[rank]: rank for rank in self._missing}
        # A rank that has answered may die while others compute.
        waited |= {process.sentinel: rank for rank, process in enumerate(ranks._processes)}
        for ready in connection.wait(list(waited), min(max(left_s, 0.0), _LONGEST_WAIT_S)):
            rank = waited[ready]
            if rank not in self._answers and ranks._connections[rank].poll():
                with self._whole("answers"):
                    try:
                        found = ranks._connections[rank].recv()
                    except (EOFError, ConnectionResetError):
                        self._lose_dead(rank)
                    if isinstance(found, Report):
                        self._lose_ended(rank, found)
                    self._answers[rank] = found
            elif isinstance(ready, int):
                self._lose_dead(rank)

    def _lose_ended(self, rank: int, report: Report) -> None:
        error = None
        with contextlib.suppress(Exception):
            error = pickle.loads(report.error)
        where = f"rank {rank} of {self._ranks.size}"
        if report.failed_at is None:
            self._lose(f"{where} ended its task before the session")
        self._lose(f"{where} failed: {report.headline}\n{report.traceback.rstrip()}", error)

    def _lose_dead(self, rank: int) -> None:
        self._ranks._processes[rank].join()
        how = end_of(self._ranks._processes[rank].exitcode)
        self._lose(f"rank {rank} of {self._ranks.size} died: {how}")

    def _lose(
        self, cause: str, error: BaseException | None = None, *, running: Sequence[int] = ()
    ) -> NoReturn:
        """Stop all ranks, and raise why; with the stacks of those that should have answered."""
        lines = [cause]
        for rank in running:
            lines.append(f"rank {rank}: still running, stopped at\n{self._ranks._dump(rank)}")
        self._lost = RankError("\n".join(lines), error)
        self._ranks.close()
        raise self._lost

    @contextlib.contextmanager
    def _whole(self, call: str) -> Iterator[None]:
        """A block that sends or receives bytes: what cuts it short ends the session."""
        with deferred_interrupt():
            self._cut = call
            try:
                yield
            except BaseException as error:
                self._end_cut(error)
                raise
            self._cut = ""

    def _end_cut(self, error: BaseException | None = None) -> None:
        if self._lost is None:
            self._lost = RankError(
                f"{self._cut} was cut short by {type(error).__name__ if error else 'a signal'}, so "
                "messages and answers no longer belong together."
            )
            self._ranks.close()

    def _check(self) -> None:
        if self._cut:
            self._end_cut()
        if self._lost is None and not self._ranks.is_usable:
            self._lost = RankError("These ranks were stopped; start new ones.")
        if self._lost is not None:
            raise self._lost
