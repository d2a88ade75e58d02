"""Collectives on their way, each ended by the lane of its group."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import PeerError
from pcomm.core.group import Group

__all__ = ["Lanes", "Ticket"]

# How often a rank that waits looks whether another has failed. A look costs about 0.1 ms.
_LOOK_EVERY_S = 0.2

Heard = Callable[[], str | None]


class Ticket:
    """A collective that has been issued; `wait` gives its result, once.

    Args:
        pending: It.
        heard: What a rank that failed has said, if one has.
    """

    def __init__(self, pending: Pending, heard: Heard) -> None:
        self._pending, self._heard = pending, heard
        self._is_done: threading.Event | None = None
        self._result: Tensor | None = None
        self._error: BaseException | None = None

    def wait(self, what: str) -> Tensor:
        """Block until the collective has ended.

        Raises:
            PeerError: A peer failed or died, or did not join within the group's time.
        """
        if self._is_done is None:
            self._finish()
        else:
            while not self._is_done.wait(_LOOK_EVERY_S):
                message = self._heard()
                if message is not None:
                    raise _peer_error(what, f"an error on {message}")
        if self._error is not None:
            raise _peer_error(what, str(self._error).split("\n")[0]) from self._error
        assert self._result is not None
        return self._result

    def _finish(self) -> None:
        try:
            self._result = self._pending.wait()
        except RuntimeError as problem:
            self._error = problem
        if self._is_done is not None:
            self._is_done.set()


class Lanes:
    """One background thread for each group, which ends its collectives in the order of issue.

    So what comes after the last byte, such as the local sum of a reduce-scatter on gloo, runs
    beside the computation, and a rank that waits can look around. On CUDA the end of a collective
    is something that the stream waits for, and there are no threads.

    Args:
        device: Where the buffers are.

    Attributes:
        heard: Asked for what a rank that failed has said, while waiting for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.heard: Heard = _nothing
        self._uses_threads = device.type == "cpu"
        self._queues: dict[int, queue.SimpleQueue[Ticket | None]] = {}

    def start(self, group: Group, pending: Pending) -> Ticket:
        """Have a collective of `group` that was just issued end in the background. Local."""
        ticket = Ticket(pending, self.heard)
        if self._uses_threads and group.size > 1:
            ticket._is_done = threading.Event()
            self._queue_of(group).put(ticket)
        return ticket

    def _queue_of(self, group: Group) -> queue.SimpleQueue[Ticket | None]:
        # Groups that share a communicator share a lane.
        key = id(group.process_group)
        if key not in self._queues:
            tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
            threading.Thread(
                target=_serve, args=(tickets,), name=f"pcomm {group.key}", daemon=True
            ).start()
            # The thread knows its queue alone, so it does not keep the model alive.
            weakref.finalize(self, tickets.put, None)
            self._queues[key] = tickets
        return self._queues[key]


def _nothing() -> None:
    return None


def _serve(tickets: queue.SimpleQueue[Ticket | None]) -> None:
    while (ticket := tickets.get()) is not None:
        ticket._finish()
        # The next one may be long in coming, and this one holds buffers.
        del ticket


def _peer_error(what: str, found: str) -> PeerError:
    return PeerError(
        f"fsdp: {what}",
        found=found,
        why="A collective ends only if every rank of its group joins it.",
        fix="Repair what that rank reports; if it reports nothing, look for its first error.",
    )
