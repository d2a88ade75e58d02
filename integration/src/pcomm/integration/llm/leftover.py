"""What a call to ranks leaves for the next one, when an interrupt has ended it early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pcomm.inference import RequestOutput

__all__ = ["NOTHING_LEFT", "Leftover", "PendingCall"]


@dataclass(frozen=True)
class PendingCall:
    """A call whose result was not taken yet.

    Attributes:
        number: Number of its message; the session has sent as many messages if this one was sent.
        method: Name of the method, or `MEET`.
        arguments: Arguments of the method.
        is_owed: True for a call that is sent although the caller no longer waits for it.
        cause: Error of the step that a meeting follows; None for another call.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    is_owed: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True)
class Leftover:
    """What the next call finds: replaced by one assignment, so that an interrupt cuts nothing.

    Attributes:
        pending: Call to be finished first; None for none.
        outputs: Outputs of steps that were not handed over yet.
    """

    pending: PendingCall | None = None
    outputs: list[RequestOutput] = field(default_factory=list)


NOTHING_LEFT = Leftover()
"""No call and no outputs."""
