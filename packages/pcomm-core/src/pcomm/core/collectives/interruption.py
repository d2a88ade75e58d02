"""Collectives whose waits end when another rank has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from pcomm.core.collectives.call import Call
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.errors import PcommError, PeerError

__all__ = ["InterruptibleCollectives", "interruptible"]

T = TypeVar("T")


def interruptible(collectives: Collectives, failure: Callable[[], str | None]) -> Collectives:
    """`collectives` whose operations are left when a rank fails; itself where there is one rank.

    Local. For all groups of a program:
    `groups.with_collectives(lambda group: interruptible(group.collectives, failure))`, whose
    differentiable operations are left in forward, in backward and in `wait`.

    Args:
        collectives: Operations without gradients that move the tensors.
        failure: Function called every few milliseconds while an operation is in flight, on the
            thread that waits (in backward of tensors on a GPU that of autograd); the message of a
            rank that failed, or None. See `Pending.wait_or`.
    """
    if collectives.size == 1:
        return collectives
    return InterruptibleCollectives(collectives, failure)


class InterruptibleCollectives(InstrumentedCollectives):
    """Starts every operation of `inner` and waits for it with `Pending.wait_or`.

    A call that blocks, or the `wait` of a started one, raises `PeerError` once `failure` returns a
    message, and so does an operation that broke because of that failure, with torch's error as the
    cause. Any other error is raised as it is. Operations that were left behind go on: their tensors
    may neither be read nor written, and no further operation of the communicator ends, until
    `Groups.abandon`.

    On NCCL a call returns once the device has finished the operation, and not once it is queued.

    Args:
        inner: Collectives that move the tensors.
        failure: Function that returns the message of a rank that failed, or None.
    """

    def __init__(self, inner: Collectives, failure: Callable[[], str | None]) -> None:
        super().__init__(inner)
        self._failure = failure

    def run(self, call: Call) -> Tensor:
        """The result of an operation, once it has ended."""
        return self._attempt(lambda: self.inner.start(call).wait_or(self._failure))

    def start(self, call: Call) -> Pending:
        """Start an operation; waiting for it ends when a rank has failed."""
        pending = self._attempt(lambda: self.inner.start(call))
        return pending.around(lambda: self._attempt(lambda: pending.wait_or(self._failure)))

    def _attempt(self, operation: Callable[[], T]) -> T:
        """The result of `operation`; torch's error of a broken connection becomes `PeerError`."""
        try:
            return operation()
        except RuntimeError as error:
            message = None if isinstance(error, PcommError) else self._failure()
            if message is None:
                raise
            raise PeerError(
                "an operation of interruptible collectives",
                found=message,
                why="The operation broke because that rank is gone.",
                fix="Abandon these groups, and open others in the next generation.",
            ) from error
