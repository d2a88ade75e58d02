"""What ranks attempt before the first step: if one fails or is asked to stop, all of them end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from pcomm.core import PcommError
from pcomm.core.errors import PeerError
from pcomm.core.process import World
from pcomm.integration.train.interrupt import Interrupt

__all__ = ["Stopped", "Together"]

T = TypeVar("T")


class Stopped(Exception):
    """The run was asked to stop before its first step. Raised on all ranks."""


class Together:
    """Makes attempts whose outcome is the same on all ranks.

    Args:
        world: All ranks.
        interrupt: Request to stop of this rank.
    """

    def __init__(self, world: World, interrupt: Interrupt) -> None:
        self.world, self.interrupt = world, interrupt

    def __call__(
        self, topic: str, attempt: Callable[[], T], *, timeout_s: float | None = None
    ) -> T:
        """The result of `attempt` on this rank. Collective.

        Args:
            topic: Subject of the attempt, the same on all ranks; part of errors.
            attempt: Local function. KeyboardInterrupt in it is a request to stop.
            timeout_s: Seconds to wait for the slowest rank; None for `PCOMM_TIMEOUT_S`.

        Raises:
            PcommError: The error of `attempt`, if it failed here.
            PeerError: It failed on another rank.
            Stopped: It failed nowhere, and a rank was asked to stop.
        """
        result, error, is_asked_to_stop = None, None, False
        try:
            if self.interrupt.is_requested:
                raise KeyboardInterrupt
            result = attempt()
        except PcommError as problem:
            error = problem
        except KeyboardInterrupt:
            is_asked_to_stop = True
        stop = PeerError(topic, found="a request to stop", why="", fix="")
        try:
            told = stop if is_asked_to_stop else error
            self.world.fail_together(topic, told, timeout_s=timeout_s)
        except PcommError as problem:
            if not isinstance(problem, PeerError) and problem is not error:
                raise
            # All ranks come here. A request alone leaves no error for the second round.
            self.world.fail_together(topic, error)
            raise Stopped from None
        return cast(T, result)
