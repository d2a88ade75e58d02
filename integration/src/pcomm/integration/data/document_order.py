"""The endless stream of documents: epoch after epoch, each in an order of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pcomm.integration.data.packing import Segment
from pcomm.integration.data.token_cache import TokenCorpus

__all__ = ["DocumentOrder"]


class DocumentOrder:
    """Where each token of the stream stands in the corpus, found without reading what is before.

    All epochs are as long, so a position in the stream names its epoch, and the order of an epoch
    follows from `seed` and its number alone.

    Args:
        corpus: The documents, at least one.
        seed: Decides the order of every epoch, in [0, 2**64).
    """

    def __init__(self, corpus: TokenCorpus, seed: int) -> None:
        self._corpus = corpus
        self._seed = seed
        self._lengths = np.diff(corpus.offsets)
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """The parts of documents that make up the positions `start` to `stop` of the stream."""
        while start < stop:
            epoch, offset = divmod(start, self._corpus.num_tokens)
            documents, ends = self._epoch(epoch)
            index = int(np.searchsorted(ends, offset, side="right"))
            left = int(ends[index]) - offset
            length = min(left, stop - start)
            document_end = int(self._corpus.offsets[documents[index] + 1])
            yield Segment(document_end - left, length, ends_document=length == left)
            start += length

    def num_ends(self, start: int, stop: int) -> int:
        """How many documents end at the positions `start` to `stop`: a few look-ups, no reading."""
        return self._ends_before(stop) - self._ends_before(start)

    def _ends_before(self, position: int) -> int:
        epoch, offset = divmod(position, self._corpus.num_tokens)
        _, ends = self._epoch(epoch)
        within = int(np.searchsorted(ends, offset, side="right"))
        return epoch * self._corpus.num_documents + within

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's documents in order, and the position within it where each one ends."""
        if epoch not in self._epochs:
            # numpy keeps the raw numbers of a bit generator stable over versions, but not
            # `permutation`, so the order is that of the raw numbers.
            bits = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64))
            documents = np.argsort(bits.random_raw(len(self._lengths)), kind="stable")
            # A batch touches two epochs at most, unless the corpus is smaller than the batch.
            while len(self._epochs) >= 2:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = documents, np.cumsum(self._lengths[documents])
        return self._epochs[epoch]
