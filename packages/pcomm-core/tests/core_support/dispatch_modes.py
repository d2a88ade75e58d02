"""Modes of torch in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

from pcomm.core.testing.programs import PATIENCE_S, scaled_s


class NestedModes:
    """Enters the modes of several threads in the order of ranks, and leaves them in the opposite.

    A mode sees the operations of its own thread. But torch notes for all threads together whether
    one is on, and each mode restores what it found when it was entered: two that overlap otherwise
    leave it on for good, and from then on nothing is compiled in this process.

    Args:
        size: Number of threads, each of which calls this once.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # One that has failed elsewhere does not come.
        self._met = threading.Barrier(size, timeout=scaled_s(PATIENCE_S))

    @contextmanager
    def __call__(self, rank: int, mode: TorchDispatchMode) -> Iterator[None]:
        """Watch the operations of this thread; called by all of them."""
        with ExitStack() as entered:
            # The others would wait for good for one that fails.
            entered.push(lambda kind, *_: self._met.abort() if kind else None)
            for turn in range(self._size):
                if turn == rank:
                    entered.enter_context(mode)
                self._met.wait()
            yield
            for turn in reversed(range(self._size)):
                if turn == rank:
                    entered.close()
                self._met.wait()
