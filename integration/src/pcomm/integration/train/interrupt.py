"""A request or an error on one rank stops all, before training and in it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast

from pcomm.core import PcommError
from pcomm.core.errors import PeerError

if TYPE_CHECKING:
    # Commands import this module before torch.
    from pcomm.core.process import World

__all__ = ["Interrupt", "RankBarrier", "Stopped", "listen_for_interrupt", "terminate_as_interrupt"]

# A launcher and the terminal may both deliver the same Ctrl-C.
_SAME_REQUEST_S = 2.0


class Interrupt:
    """Whether the run was asked to stop."""

    def __init__(self) -> None:
        self.is_requested = False
        self._requested_at = 0.0
        self._ends_at_once = False

    @contextmanager
    def ends_at_once(self) -> Iterator[None]:
        """While there is nothing to save: a request raises KeyboardInterrupt. Local."""
        self._ends_at_once = True
        try:
            if self.is_requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._ends_at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.is_requested and now - self._requested_at > _SAME_REQUEST_S:
            raise KeyboardInterrupt
        if not self.is_requested:
            self.is_requested, self._requested_at = True, now
            if self._ends_at_once:
                raise KeyboardInterrupt


@contextmanager
def listen_for_interrupt() -> Iterator[Interrupt]:
    """Note SIGINT and SIGTERM instead of ending; a second one, later, ends at once. Local.

    Outside the main thread, where Python delivers no signals, nothing is changed.
    """
    interrupt = Interrupt()
    with _handled_by(interrupt._request, signal.SIGINT, signal.SIGTERM):
        yield interrupt


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM, too. Local; main thread only, as above."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt, signal.SIGTERM):
        yield


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


T = TypeVar("T")


class Stopped(Exception):
    """The run was asked to stop before its first step. Raised on all ranks."""


class RankBarrier:
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
