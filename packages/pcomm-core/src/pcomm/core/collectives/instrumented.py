"""Collectives that pass every call on to others: the base of those that add something to them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from pcomm.core.collectives.call import Call, OperationName
from pcomm.core.collectives.handle import Handle
from pcomm.core.collectives.protocol import Collectives, Pending

__all__ = ["InstrumentedCollectives"]


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
