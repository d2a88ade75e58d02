"""Waiting for a collective that a peer may never join."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from pcomm.core.collectives.protocol import Pending
from pcomm.fsdp.guards import running_model_errors

__all__ = ["POLL_PERIOD_S", "FailureAwareWait"]

POLL_PERIOD_S = 0.2
"""Seconds between two looks for a failed peer while a rank waits. A look costs about 0.1 ms."""


class FailureAwareWait:
    """Completes collectives, and raises if a peer fails that one of them needs.

    Attributes:
        peer_failure: Returns the message of a rank that has failed; None while there is none.
    """

    def __init__(self) -> None:
        self.peer_failure: Callable[[], str | None] = lambda: None

    def __call__(self, pending: Pending, what: str) -> Tensor:
        """Block until a collective has ended, polling for a peer failure, and return its result.

        Where the host cannot see the end, as on a GPU, there is no polling: the stream waits.

        Args:
            pending: The collective.
            what: Its description for an error, such as `"gather of blocks.0"`.

        Raises:
            PeerError: A peer failed or died, or did not join within the group's time limit.
        """
        is_done = threading.Event()
        if pending.on_done(is_done.set):
            while not is_done.wait(POLL_PERIOD_S):
                message = self.peer_failure()
                # The rank that failed may have joined this collective before.
                if message is not None and not is_done.wait(POLL_PERIOD_S):
                    raise running_model_errors.collective_failed(what, f"an error on {message}")
        try:
            return pending.wait()
        except RuntimeError as problem:
            # A rank that failed may have closed its connections since, and has said why before.
            message = self.peer_failure()
            found = str(problem).split("\n")[0] if message is None else f"an error on {message}"
            raise running_model_errors.collective_failed(what, found) from problem
