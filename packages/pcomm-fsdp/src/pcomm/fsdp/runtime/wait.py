"""Waiting for a collective that a peer may never join."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import PeerError

__all__ = ["FailureAwareWait"]

# How often a rank that waits looks whether another has failed. A look costs about 0.1 ms.
_LOOK_EVERY_S = 0.2


class FailureAwareWait:
    """Ends collectives, and looks around while a peer keeps it waiting.

    Attributes:
        heard: Asked for what a rank that failed has said, if one has.
    """

    def __init__(self) -> None:
        self.heard: Callable[[], str | None] = _nothing

    def wait(self, pending: Pending, what: str) -> Tensor:
        """The result of a collective; blocks until it has ended.

        Where the host cannot see the end, as on a GPU, nobody looks around: the stream waits.

        Raises:
            PeerError: A peer failed or died, or did not join within the group's time.
        """
        is_done = threading.Event()
        if pending.on_done(is_done.set):
            while not is_done.wait(_LOOK_EVERY_S):
                message = self.heard()
                # The rank that failed may have joined this one before.
                if message is not None and not is_done.wait(_LOOK_EVERY_S):
                    raise _peer_error(what, f"an error on {message}")
        try:
            return pending.wait()
        except RuntimeError as problem:
            # A rank that failed may have closed its connections since, and has said why before.
            message = self.heard()
            found = str(problem).split("\n")[0] if message is None else f"an error on {message}"
            raise _peer_error(what, found) from problem


def _nothing() -> None:
    return None


def _peer_error(what: str, found: str) -> PeerError:
    return PeerError(
        f"fsdp: {what}",
        found=found,
        why="A collective ends only if every rank of its group joins it.",
        fix="Repair what that rank reports; if it reports nothing, look for its first error.",
    )
