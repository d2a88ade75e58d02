"""Collectives that keep a record of every call, for tests and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from pcomm.core.collectives.call import Call
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.errors import LayoutError

__all__ = ["CallRecord", "SpyCollectives"]


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
