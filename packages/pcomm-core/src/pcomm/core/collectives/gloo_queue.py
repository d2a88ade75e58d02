"""A queue that runs operations in order beside their caller, as a communicator of NCCL does."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

__all__ = ["Transfer", "WorkItem", "WorkQueue"]


class WorkItem(Protocol):
    """An operation in two steps, so that the next one follows without a gap."""

    def begin(self) -> bool:
        """Post sends and receives without waiting; returns whether nothing is left to post."""
        ...

    def finish(self, has_announced: Callable[[], None]) -> None:
        """Wait for its end. Calls `has_announced` as soon as nothing is left to post."""
        ...


class Transfer:
    """An item that is queued, in flight, or has ended. Made by `WorkQueue.start`."""

    __slots__ = (
        "_calls",
        "_error",
        "_has_ended",
        "_is_over",
        "_lock",
        "item",
        "problem_of_begin",
    )

    def __init__(self, item: WorkItem) -> None:
        self.item: WorkItem | None = item
        self.problem_of_begin: BaseException | None = None
        self._calls: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._is_over.is_set()

    def is_done(self) -> bool:
        """Whether it has ended, as `Pending.is_done` says."""
        return self.is_over

    def wait(self) -> None:
        """Block until it has ended. Local.

        Raises:
            RuntimeError: Torch's, if a peer has gone or the group's time is up; ours, if an
                operation before this one failed.
        """
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def on_done(self, call: Callable[[], None]) -> bool:
        """Have `call` called at its end, as `Pending.on_done` does; the end can always be seen."""
        with self._lock:
            if not self._has_ended:
                self._calls.append(call)
                return True
        call()
        return True

    def end(self, error: BaseException | None) -> None:
        """Record that it has ended, and call what was given to `on_done`. The first end counts."""
        with self._lock:
            if self._has_ended:
                return
            self._error = error
            # Its memory is free before the first of these calls, unless it failed.
            self.item = None
            self._has_ended = True
            calls, self._calls = self._calls, []
        for call in calls:
            with suppress(Exception):
                call()
        self._is_over.set()


class WorkQueue:
    """A queue of operations. Each begins when the one before has nothing left to post.

    The first asynchronous operation starts a worker thread. It completes operations in order and
    keeps their tensors alive until then.
    """

    def __init__(self) -> None:
        # A collection of cycles may call `forget` on a thread that holds it.
        self._lock = threading.RLock()
        self._not_begun: deque[Transfer] = deque()
        # By identity; what has not ended yet.
        self._in_flight: set[Transfer] = set()
        self._is_open = True
        # Words and not the exception, which would hold the frames of all who have raised it.
        self._failure: str | None = None
        # What failed, or had begun behind it: the peers may still read and write its memory.
        self._abandoned: list[WorkItem] | None = []
        self._last: Transfer | None = None
        self._to_finish: SimpleQueue[tuple[Callable[[Transfer], None], Transfer] | None] = (
            SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def rest(self) -> None:
        """End the thread once all that was started has ended. Local.

        It returns without waiting for operations in flight, since a peer that never answers must
        not keep this rank from closing.
        """
        thread = self._end_thread()
        is_idle = self._last is None or self._last.is_over
        if thread is not None and is_idle:
            thread.join()

    def forget(self) -> None:
        """Drop the memory of operations that failed, once no peer can reach it any more. Local."""
        self._end_thread()
        with self._lock:
            # What fails from now on is not kept either. An error holds the frames that raised it.
            self._abandoned = self._last = None

    def abandon(self, error: Callable[[], Exception]) -> None:
        """End all that was started with an error, without waiting for it. Local.

        The memory of what has begun is kept until `forget`, since the peers may still read and
        write it. The thread stays until the operation that it waits for has ended.

        Args:
            error: Function that makes the error of one operation.
        """
        self.rest()
        with self._lock:
            self._failure = self._failure or "the communicator was abandoned"
            self._not_begun.clear()
            in_flight, self._in_flight = self._in_flight, set()
            if self._abandoned is not None:
                self._abandoned += [t.item for t in in_flight if t.item is not None]
        for transfer in in_flight:
            transfer.end(error())

    def start(self, item: WorkItem, *, is_async: bool) -> Transfer:
        """Run an operation after all that were started before. Called by one thread.

        After an operation that failed all others fail, since its messages may still be in flight.

        Args:
            item: Operation to run.
            is_async: True to return at once; if False, it has ended on return.
        """
        transfer = Transfer(item)
        is_alone = self._last is None or self._last.is_over
        try:
            with self._lock:
                self._in_flight.add(transfer)
                self._not_begun.append(transfer)
                self._begin_next()
            if is_async or not is_alone:
                self._last = transfer
                self._finish_later(transfer)
            else:
                self._finish(transfer)
        except BaseException as problem:  # an interrupt between two lines
            self._fail(problem, transfer)
            raise
        if not is_async:
            transfer.wait()
        return transfer

    def _begin_next(self) -> None:
        while self._is_open and self._failure is None and self._not_begun:
            transfer = self._not_begun.popleft()
            assert transfer.item is not None
            try:
                self._is_open = transfer.item.begin()
            except BaseException as problem:  # raised where it is waited for
                # Those before it may still end well, so it counts when its turn has come.
                transfer.problem_of_begin, self._is_open = problem, False

    def _has_announced(self) -> None:
        with self._lock:
            self._is_open = True
            self._begin_next()

    def _finish(self, transfer: Transfer) -> None:
        item = transfer.item
        if item is None:
            # It was abandoned.
            return
        error = transfer.problem_of_begin
        if self._failure is not None:
            error = RuntimeError(f"An operation before this one failed with {self._failure}")
        elif error is None:
            try:
                item.finish(self._has_announced)
            except BaseException as problem:  # raised where it is waited for
                error = problem
        # Transfer.end frees its memory before it tells the end.
        item = None
        if error is not None:
            self._fail(error, transfer)
        with self._lock:
            self._in_flight.discard(transfer)
        transfer.end(error)

    def _fail(self, problem: BaseException, transfer: Transfer) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = f"{type(problem).__name__}: {problem}"
            if transfer in self._not_begun:
                self._not_begun.remove(transfer)
            elif transfer.item is not None and self._abandoned is not None:
                self._abandoned.append(transfer.item)

    def _end_thread(self) -> threading.Thread | None:
        """Tell the thread to end; returns it unless it is this thread or was never started."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._to_finish.put(None)
        return None if thread is threading.current_thread() else thread

    def _finish_later(self, transfer: Transfer) -> None:
        if self._thread is None:
            # A daemon: a peer that never answers must not keep the process from ending.
            self._thread = threading.Thread(
                target=_finish_all, args=(self._to_finish,), name="pcomm work queue", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._to_finish.put, None)
        self._to_finish.put((self._finish, transfer))


def _finish_all(
    to_finish: SimpleQueue[tuple[Callable[[Transfer], None], Transfer] | None],
) -> None:
    """Finish transfers until None comes; holds no `WorkQueue` in between, so that it can go."""
    while True:
        found = to_finish.get()
        if found is None:
            return
        finish, transfer = found
        finish(transfer)
        del found, finish, transfer
