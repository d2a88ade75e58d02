"""Collectives around others: a base, a spy that records calls, and waits that a failure ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from pcomm.core.collectives.protocol import Call, Collectives, Handle, OperationName, Pending
from pcomm.core.errors import LayoutError, PcommError, PeerError

__all__ = [
    "CallRecord",
    "InstrumentedCollectives",
    "InterruptibleCollectives",
    "SpyCollectives",
    "interruptible",
]


class InstrumentedCollectives(Handle, Collectives):
    """Passes every call on to `inner`; a subclass writes `run`, `start` or both around that.

    Args:
        inner: Collectives that move the tensors.
    """

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    def run(self, call: Call) -> Tensor:
        """Pass on a call that blocks."""
        return self.inner.run(call)

    def start(self, call: Call) -> Pending:
        """Pass on a call that returns at once."""
        return self.inner.start(call)

    def skip(self, operation: OperationName) -> None:
        """Pass on."""
        self.inner.skip(operation)

    def recording(self) -> AbstractContextManager[None]:
        """See `Collectives.recording`."""
        return self.inner.recording()

    def sequence(self) -> AbstractContextManager[None]:
        """See `Collectives.sequence`."""
        return self.inner.sequence()

    def empty_input(
        self, operation: OperationName, shape: Sequence[int], like: Tensor
    ) -> Tensor | None:
        """See `Collectives.empty_input`."""
        return self.inner.empty_input(operation, shape, like)


@dataclass(frozen=True)
class CallRecord:
    """Name, input and least cost of one call; it holds no tensor.

    Args:
        operation: Name without `_async`.
        input_shape: Shape of the input tensor.
        input_bytes: Size of the input tensor, in bytes.
        sent_bytes: Least number of bytes that this rank must send, see `Call.sent_bytes`.
        is_async: True if it was started and waited for separately.
    """

    operation: str
    input_shape: tuple[int, ...]
    input_bytes: int
    sent_bytes: int
    is_async: bool


class SpyCollectives(InstrumentedCollectives):
    """Passes everything on to `inner` and keeps a list of `calls`.

    Put it under the differentiable ones to see backward too:
    `DifferentiableCollectives(SpyCollectives(group.collectives))`.
    """

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.calls: list[CallRecord] = []

    @property
    def counts(self) -> dict[str, int]:
        """Number of calls by operation."""
        return dict(Counter(call.operation for call in self.calls))

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank had to send, summed over all calls."""
        return sum(call.sent_bytes for call in self.calls)

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()

    def run(self, call: Call) -> Tensor:
        """Record and pass on."""
        self._record(call, False)
        return self.inner.run(call)

    def start(self, call: Call) -> Pending:
        """Record and pass on."""
        self._record(call, True)
        return self.inner.start(call)

    def _record(self, call: Call, is_async: bool) -> None:
        try:
            x, sent_bytes = call.x, call.sent_bytes(self.rank, self.size)
        except LayoutError:
            self.skip(call.operation)
            raise
        self.calls.append(
            CallRecord(call.operation, tuple(x.shape), x.nbytes, sent_bytes, is_async)
        )


T = TypeVar("T")


def interruptible(
    collectives: Collectives, failure: Callable[[], str | None], *, is_aborted: bool = False
) -> Collectives:
    """`collectives` whose operations are left when a rank fails; itself where there is one rank.

    Local. For all groups of a program:
    `groups.with_collectives(lambda group: interruptible(group.collectives, failure))`, whose
    differentiable operations are left in forward, in backward and in `wait`.

    Args:
        collectives: Operations without gradients that move the tensors.
        failure: Function called every few milliseconds while an operation is in flight, on the
            thread that waits (in backward of tensors on a GPU that of autograd); the message of a
            rank that failed, or None. See `Pending.wait_or`.
        is_aborted: True where the communicator is aborted once `failure` returns a message, as by
            `Groups.abort_on`. A wait then orders the stream alone, and only the next call raises.
    """
    if collectives.size == 1:
        return collectives
    return (_Aborted if is_aborted else InterruptibleCollectives)(collectives, failure)


class InterruptibleCollectives(InstrumentedCollectives):
    """Starts every operation of `inner` and waits for it with `Pending.wait_or`.

    A call that blocks, or the `wait` of a started one, raises `PeerError` once `failure` returns a
    message, and so does an operation that broke because of that failure, with torch's error as the
    cause. Any other error is raised as it is. Operations that were left behind go on: their tensors
    may neither be read nor written, and no further operation of the communicator ends, until
    `Groups.abandon`.

    On NCCL a call returns once the device has finished the operation, and not once it is queued;
    `interruptible` with `is_aborted` makes others there.

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
            raise _is_gone(message) from error


class _Aborted(InterruptibleCollectives):
    """Queues operations on a device, whose waits an abort ends elsewhere; calls look for it.

    An operation that was aborted ends with any numbers, so the caller looks once more after it has
    waited for the device and before it uses what it found there.
    """

    def run(self, call: Call) -> Tensor:
        """The result of an operation, once it is queued."""
        return self._attempt(lambda: self.inner.run(call))

    def start(self, call: Call) -> Pending:
        """Start an operation; waiting for it has the stream wait."""
        pending = self._attempt(lambda: self.inner.start(call))
        return pending.around(lambda: self._attempt(pending.wait))

    def _attempt(self, operation: Callable[[], T]) -> T:
        if (message := self._failure()) is not None:
            raise _is_gone(message)
        return super()._attempt(operation)


def _is_gone(message: str) -> PeerError:
    return PeerError(
        "an operation of interruptible collectives",
        found=message,
        why="The operation needs that rank, which is gone.",
        fix="Abandon these groups, and open others in the next generation.",
    )
