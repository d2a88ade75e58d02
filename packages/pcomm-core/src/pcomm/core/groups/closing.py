"""Calls that are made before groups close, or when they are abandoned."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Closing"]


class Closing:
    """Calls that are made once, when the groups that they depend on close."""

    def __init__(self) -> None:
        # By an object each, since two equal calls are two.
        self._calls: dict[object, Callable[[], object]] = {}
        self._local: set[object] = set()

    def add(self, call: Callable[[], object], *, is_local: bool = False) -> Callable[[], None]:
        """Have `call` called. Local.

        Args:
            call: Function without arguments. It is kept until then, with all that it refers to.
            is_local: True if it neither communicates nor waits for another rank, so that it can be
                called when the groups are abandoned.

        Returns:
            A function that takes `call` back; calling it again does nothing.
        """
        key = object()
        self._calls[key] = call
        if is_local:
            self._local.add(key)

        def take_back() -> None:
            self._calls.pop(key, None)
            self._local.discard(key)

        return take_back

    def take_all(self) -> list[Callable[[], object]]:
        """All calls in the order in which they were added; none of them is kept."""
        calls = list(self._calls.values())
        self._calls.clear()
        self._local.clear()
        return calls

    def take_local(self) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
        """The calls that are local and those that are not, in order; none of them is kept."""
        local = [call for key, call in self._calls.items() if key in self._local]
        others = [call for key, call in self._calls.items() if key not in self._local]
        self.take_all()
        return local, others
