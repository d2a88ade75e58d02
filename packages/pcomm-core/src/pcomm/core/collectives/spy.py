"""Collectives that note what passes through them, for tests and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pcomm.core.collectives.instrumented import InstrumentedCollectives, Operation
from pcomm.core.collectives.protocol import Collectives, Pending

__all__ = ["Call", "SpyCollectives"]


@dataclass(frozen=True)
class Call:
    """One operation: its name, what entered it, and what it costs on the wire at best.

    Args:
        operation: Name without `_async`.
        input_shape: Shape of the tensor that went in.
        input_bytes: Its size.
        sent_bytes: Least number of bytes that this rank must send; see
            `pcomm.core.collectives.instrumented.Operation`.
        is_async: Whether it was started and waited for separately.
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
        self.calls: list[Call] = []

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

    def blocking(
        self, operation: Operation, run: Callable[[], Tensor], start: Callable[[], Pending]
    ) -> Tensor:
        """Note and pass on."""
        self._note(operation, False)
        return run()

    def started(self, operation: Operation, start: Callable[[], Pending]) -> Pending:
        """Note and pass on."""
        self._note(operation, True)
        return start()

    def _note(self, operation: Operation, is_async: bool) -> None:
        x = operation.x
        call = Call(operation.name, tuple(x.shape), x.nbytes, operation.sent_bytes, is_async)
        self.calls.append(call)
