"""One forward of the model, as long as its graph lives."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["ForwardPass"]


class ForwardPass:
    """What one forward has to tell its backward. Hooks in its graph hold it, and it holds no model.

    Args:
        token: Which forward of the model it is; ascending.
        versions: Of the shards when it began.

    Attributes:
        thread: The thread that computed it.
        watched: Units of which it tells when backward has passed them.
        unbounded: Units of which it does not, for a use at least: no input had a gradient.
        is_over: Whether it has had its backward.
        open_inputs: For each unit, how many of its uses backward has not passed yet.
    """

    def __init__(self, token: int, versions: tuple[int, ...] = ()) -> None:
        self.token, self.versions = token, versions
        self.thread = threading.get_ident()
        self.is_over = False
        self.watched: set[str] = set()
        self.unbounded: set[str] = set()
        self.open_inputs: Counter[str] = Counter()

    def has_passed(self, unit: str) -> bool:
        """Whether backward has passed all uses of a unit."""
        return not self.open_inputs[unit] and unit not in self.unbounded
