"""Waiting for what runs outside Python, so that Ctrl-C is heard and the wait is explained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Beside", "every"]

T = TypeVar("T")
Item = TypeVar("Item")

# How long a signal may stay unheard.
_LOOK_S = 0.1


class Beside(Generic[T]):
    """A call that a thread makes, while this one waits for it and hears signals.

    Python delivers signals between two steps of its own, in the main thread alone, and a library
    that computes for minutes takes no such step.
    """

    def __init__(self) -> None:
        self._is_abandoned = threading.Event()

    def run(self, call: Callable[[], T], tick: Callable[[], None]) -> T:
        """What `call` returns, or the exception that it raises. Local.

        An exception here, such as KeyboardInterrupt, leaves the thread behind: it ends with the
        process, or as soon as it comes to `fed`.

        Args:
            call: Runs in a thread of its own.
            tick: Is called about ten times a second while it runs.
        """
        results: list[T] = []
        errors: list[BaseException] = []
        is_done = threading.Event()

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            finally:
                is_done.set()

        # The interpreter does not wait for it at its end.
        thread = threading.Thread(target=work, name="pcomm beside", daemon=True)
        thread.start()
        try:
            while not is_done.wait(_LOOK_S):
                tick()
        except BaseException:
            self._is_abandoned.set()
            raise
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def fed(self, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, until nothing waits for the call any more; then an error ends it."""
        for item in items:
            if self._is_abandoned.is_set():
                raise InterruptedError("nothing waits for this call any more")
            yield item


def every(
    seconds: float, clock: Callable[[], float], say: Callable[[float], None]
) -> Callable[[], None]:
    """A `tick` that calls `say` with the seconds since now, each time `seconds` have passed."""
    start = last = clock()

    def tick() -> None:
        nonlocal last
        now = clock()
        if now - last >= seconds:
            last = now
            say(now - start)

    return tick
