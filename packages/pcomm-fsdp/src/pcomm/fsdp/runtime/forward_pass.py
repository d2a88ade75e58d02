"""One forward of the model, as long as its graph lives."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["ForwardPass"]


class ForwardPass:
    """State that a forward leaves for its backward. Hooks in its graph hold it; it holds no model.

    Args:
        token: Number of the forward in the model, ascending.
        versions: Version of each shard when it began.

    Attributes:
        thread: Identifier of the thread that computed it.
        watched: Units with an input hook that reports when backward has passed them.
        unbounded: Units with a use that no input hook reports: no input had a gradient.
        is_over: True after its backward.
        open_inputs: Number of uses that backward has not passed yet, by unit.
    """

    def __init__(self, token: int, versions: tuple[int, ...] = ()) -> None:
        self.token, self.versions = token, versions
        self.thread = threading.get_ident()
        self.is_over = False
        self.watched: set[str] = set()
        self.unbounded: set[str] = set()
        self.open_inputs: Counter[str] = Counter()

    def has_passed(self, unit: str) -> bool:
        """True if backward has passed all uses of a unit."""
        return not self.open_inputs[unit] and unit not in self.unbounded
