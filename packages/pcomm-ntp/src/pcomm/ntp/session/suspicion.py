"""Collectives whose errors are suspicions: they say that something is wrong, and not who is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pcomm.core.collectives import Collectives, InstrumentedCollectives, Pending
from pcomm.core.collectives.call import Call
from pcomm.core.collectives.interruption import interruptible
from pcomm.core.errors import PcommError, PeerError
from pcomm.ntp.session.headline import headline

__all__ = ["SuspectedFailure", "attempted", "suspecting"]

T = TypeVar("T")
_OPERATION = "an operation between ranks"


class SuspectedFailure(PeerError):
    """An operation between ranks ended with an error, and no rank is known to have failed."""


def suspecting(collectives: Collectives, failure: Callable[[], str | None]) -> Collectives:
    """Interruptible collectives that raise any other error of torch's as a `SuspectedFailure`.

    Local. A connection that breaks raises the same class wherever torch finds it, so that it can be
    told from errors of a model. One rank's collectives are returned as they are.
    """
    if collectives.size == 1:
        return collectives
    return _Suspecting(interruptible(collectives, failure))


class _Suspecting(InstrumentedCollectives):
    """Passes operations on, and gives errors of torch's a class of their own."""

    def run(self, call: Call) -> Tensor:
        """The result of an operation."""
        return attempted(_OPERATION, lambda: self.inner.run(call))

    def start(self, call: Call) -> Pending:
        """Start an operation."""
        pending = attempted(_OPERATION, lambda: self.inner.start(call))
        return pending.around(lambda: attempted(_OPERATION, pending.wait))


def attempted(asked: str, operation: Callable[[], T]) -> T:
    """The result of an operation between ranks, `asked` in words. Local.

    Raises:
        SuspectedFailure: `operation` raised an error of torch's.
    """
    try:
        return operation()
    except RuntimeError as error:
        # Memory that this rank lacks is no suspicion: it would lack it again in each generation.
        if isinstance(error, PcommError | torch.OutOfMemoryError):
            raise
        raise SuspectedFailure(
            asked,
            found=headline(error),
            why="A connection broke, or the ranks made different calls; which rank is at fault is "
            "not known.",
            fix="Look for the first error of another rank; a session meets and goes on.",
        ) from error
