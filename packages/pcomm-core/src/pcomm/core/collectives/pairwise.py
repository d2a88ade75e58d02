"""Sends and receives between all pairs of ranks of a gloo group.

Gloo's own collectives post a send before the receive that answers it. The note that a receive is
there then waits in the connection behind the data of that send, so that the two directions of a
link take turns. Here receives are posted first, and both directions are busy at once. A connection
carries what was posted to it in order, so operations that are started one after another between
two ranks follow each other without a gap and without overtaking: the in-order queue of NCCL. Gloo
has one connection for each worker thread of the group, so with one thread that is so for all
operations, and with two, its default, for gathers and for reduce-scatters by themselves.

A thread waits for operations that run beside the computation. It says when they have ended, and it
keeps their memory until then, whoever has lost interest.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Pairs", "Transfer"]

# Two kinds that meet by mistake never match, so it is a time-out or a ledger's error, and not
# numbers of the one in the memory of the other.
_KINDS = {"all_gather": 0, "reduce_scatter": 1}
# Beyond the tags that people use, and within the 31 bits that torch allows.
_FIRST_TAG, _NUM_TAGS = 1 << 30, 1 << 30


class Transfer:
    """What one operation sends and receives. Made by `Pairs.start`."""

    __slots__ = ("_calls", "_error", "_has_ended", "_is_over", "_lock", "_works")

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self._calls: list[Callable[[], None]] = []
        self._error: Exception | None = None
        self._has_ended = False
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Block until everything is sent and received. Local.

        Raises:
            RuntimeError: Torch's, if a peer has gone or the group's time is up.
        """
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def on_done(self, call: Callable[[], None]) -> bool:
        """See `Pending.on_done`; the end can always be seen here."""
        with self._lock:
            if not self._has_ended:
                self._calls.append(call)
                return True
        call()
        return True

    def run(self) -> None:
        """Wait for all works, and tell those who asked; called once."""
        for work in self._works:
            try:
                work.wait()
            except Exception as problem:  # handed to whoever waits
                # The rest may still write into its memory, but nobody has to wait for that.
                self._tell(problem)
        self._tell(None)
        self._works = ()

    def _tell(self, error: Exception | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended, self._error = True, error
            calls, self._calls = self._calls, []
        for call in calls:
            with suppress(Exception):
                call()
        self._is_over.set()


class Pairs:
    """The connections between all pairs of ranks of one gloo group.

    Args:
        process_group: A group with a gloo backend that this rank belongs to.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._backend: Any = process_group._get_backend(torch.device("cpu"))
        self._rank, self._size = process_group.rank(), process_group.size()
        self._count = 0
        self._waiting: SimpleQueue[Transfer | None] = SimpleQueue()
        self._has_thread = False

    def start(
        self,
        kind: Literal["all_gather", "reduce_scatter"],
        send: Sequence[Tensor],
        receive: Sequence[Tensor],
        *,
        is_async: bool,
    ) -> Transfer:
        """Send `send[i]` to rank i and fill `receive[i]` from there, for all other ranks.

        Collective. Tensors are dense and on the CPU; empty ones are neither sent nor expected.

        Args:
            kind: What it is for; the same on all ranks.
            send: One for each rank; this rank's own is not looked at.
            receive: One for each rank; this rank's own is left as it is.
            is_async: Whether to return at once; if not, it has ended on return.
        """
        tag = _FIRST_TAG + (2 * self._count + _KINDS[kind]) % _NUM_TAGS
        self._count += 1
        rank, size = self._rank, self._size
        works = []
        for step in range(1, size):
            source = (rank - step) % size
            if receive[source].numel():
                works.append(self._backend.recv([receive[source]], source, tag))
        # Each rank begins with another one, so that no link has to take in all at once.
        for step in range(1, size):
            target = (rank + step) % size
            if send[target].numel():
                works.append(self._backend.send([send[target]], target, tag))
        transfer = Transfer(works)
        if is_async:
            self._watch(transfer)
        else:
            self._wait_here(transfer, works)
        return transfer

    def _wait_here(self, transfer: Transfer, works: list[dist.Work]) -> None:
        try:
            while works:
                works[0].wait()
                del works[0]
        except BaseException:
            self._watch(transfer)
            raise
        transfer.run()

    def _watch(self, transfer: Transfer) -> None:
        if not self._has_thread:
            self._has_thread = True
            # A daemon: a peer that never answers must not keep the process from ending.
            threading.Thread(
                target=_run_all, args=(self._waiting,), name="pcomm pairs", daemon=True
            ).start()
            weakref.finalize(self, self._waiting.put, None)
        self._waiting.put(transfer)


def _run_all(waiting: SimpleQueue[Transfer | None]) -> None:
    """Run transfers in order until None comes. Knows the queue alone, so that `Pairs` can go."""
    while (transfer := waiting.get()) is not None:
        transfer.run()
