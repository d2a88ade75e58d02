"""Calls that are made before groups close."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Closing"]


class Closing:
    """Calls that are made once, when the groups that they depend on close."""

    def __init__(self) -> None:
        # By an object each, since two equal calls are two.
        self._calls: dict[object, Callable[[], object]] = {}

    def add(self, call: Callable[[], object]) -> Callable[[], None]:
        """Have `call` called. Local.

        Args:
            call: Function without arguments. It is kept until then, with all that it refers to.

        Returns:
            A function that takes `call` back; calling it again does nothing.
        """
        key = object()
        self._calls[key] = call

        def take_back() -> None:
            self._calls.pop(key, None)

        return take_back

    def take_all(self) -> list[Callable[[], object]]:
        """All calls in the order in which they were added; none of them is kept."""
        calls = list(self._calls.values())
        self._calls.clear()
        return calls
