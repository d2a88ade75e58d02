"""The order in which rows of the stream become batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowOrder"]


class RowOrder:
    """A shuffle of the rows of each window of the stream; a permutation of all rows.

    Neighbouring rows of the stream are mostly of one document, and a batch of one document says
    little about the others: the quick-start model learns much less from as many of them (see
    `docs/decisions/0005-mixed-rows.md`). So the rows of a window, which is about an epoch long,
    are mixed.

    Args:
        seed: Decides the order, in [0, 2**64).
        window: Rows that are mixed with each other, at least 1.
    """

    def __init__(self, seed: int, window: int) -> None:
        self._seed, self._window = seed, window
        self._windows: dict[int, NDArray[np.int64]] = {}

    def row(self, index: int) -> int:
        """Which row of the stream is the `index`-th to be read; a pure function of the seed."""
        window, within = divmod(index, self._window)
        return window * self._window + int(self._order(window)[within])

    def _order(self, window: int) -> NDArray[np.int64]:
        if window not in self._windows:
            # The counter sets it apart from the order of the documents, which has the same key.
            key = np.array([self._seed, window], dtype=np.uint64)
            bits = np.random.Philox(key=key, counter=np.array([0, 0, 0, 1], dtype=np.uint64))
            order = np.argsort(bits.random_raw(self._window), kind="stable")
            # A batch touches two windows at most, unless the corpus is smaller than the batch.
            while len(self._windows) >= 2:
                self._windows.pop(next(iter(self._windows)))
            self._windows[window] = order
        return self._windows[window]
