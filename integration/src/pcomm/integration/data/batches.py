"""Batch number i of a run: a stream of documents, packed into rows, in a shuffled order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcomm.core import Layout
from pcomm.core.errors import ConfigError
from pcomm.integration.data.token_cache import TokenCorpus

__all__ = [
    "IGNORE",
    "PADDING",
    "Batch",
    "DocumentOrder",
    "DocumentSlice",
    "Mixture",
    "ShuffledRows",
    "TrainBatches",
    "dealt_rows",
    "evaluation_batches",
    "pack",
    "padded",
]

IGNORE = -100
"""The target of a token that predicts nothing; torch's cross-entropy leaves it out by default."""

PADDING = -1
"""The `start` of a segment that only fills a row."""


class DocumentSlice(NamedTuple):
    """A part of one document within one row."""

    start: int
    """First token, counted in the corpus; or `PADDING`."""

    length: int
    """How many tokens, at least 1."""

    ends_document: bool
    """Whether its last token is the document's last, which predicts nothing."""


@dataclass(frozen=True)
class Batch:
    """The tokens that one rank computes at once. T tokens in S segments."""

    tokens: NDArray[np.int64]
    """`[T]`, inputs."""

    targets: NDArray[np.int64]
    """`[T]`, the next token of the same document, or `IGNORE`."""

    cu_seqlens: tuple[int, ...]
    """`S + 1` boundaries: segment s is `cu_seqlens[s]:cu_seqlens[s + 1]`; from 0 to T."""

    num_bytes: int
    """Bytes of text that the targets stand for; a document's end counts as a target of 0 bytes."""


# Fixed, so that every evaluation of a corpus reads the same documents.
_EVALUATION_SEED = 0


class Mixture:
    """Deals rows to sources by their weights: after any number of rows each has its share.

    Nothing is drawn and nothing remembered: whose row n is follows from n and the weights alone, so
    that a run that goes on, on any number of ranks, reads what it would have read. Of S sources
    each is within max(1, S / 2) rows of its share at any time.

    Args:
        weights: One finite number above 0 for each source, at least one.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # Exact, so that no rounding makes a row belong to two sources or to none.
        left = [Fraction(weight) for weight in weights]
        shares = [own / sum(left[i:]) for i, own in enumerate(left)]
        self._shares = [(share.numerator, share.denominator) for share in shares]

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows come from each source."""
        found = []
        for numerator, denominator in self._shares:
            # The nearest whole number of those that the sources before have left.
            own = (2 * rows * numerator + denominator) // (2 * denominator)
            found.append(own)
            rows -= own
        return found

    def place(self, row: int) -> tuple[int, int]:
        """The source of a row, and how many rows before it come from there.

        Each share of what is left rises by none or one from a row to the next, so exactly one
        source has one more.
        """
        after = row + 1
        for source, (numerator, denominator) in enumerate(self._shares):
            before = (2 * row * numerator + denominator) // (2 * denominator)
            own = (2 * after * numerator + denominator) // (2 * denominator)
            if own > before:
                return source, before
            row -= before
            after -= own
        raise AssertionError("the last source takes all that are left")


class TrainBatches:
    """The training batches of a run. Batch i depends on the corpus, `seed` and i alone.

    The stream of documents is cut into rows, which are mixed (see `ShuffledRows`); the global batch
    of step i is the next `rows_per_batch` of them. Data-parallel rank r of n has every n-th from
    the r-th on, so the ranks share a batch without overlap, and the batch is the same for every n.
    Ranks that take unequal shares of it are dealt its rows by `dealt_rows`.

    Args:
        corpus: The train split.
        seed: Decides the order of the documents.
        sequence_length: Tokens in a row.
        global_batch_tokens: Tokens in the batch of one step, over all data-parallel ranks.
        micro_batch_tokens: Tokens that one rank computes at once; None for its whole share.
        weights: Weight of each source of the corpus, whose rows are then dealt by a `Mixture`;
            empty to read all documents alike.

    Raises:
        ConfigError: The batch does not consist of whole rows.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        seed: int,
        sequence_length: int,
        global_batch_tokens: int,
        micro_batch_tokens: int | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        _check_whole("train.global_batch_tokens", global_batch_tokens, sequence_length)
        _check_whole("train.micro_batch_tokens", micro_batch_tokens or 0, sequence_length)
        self._corpus = corpus
        sources = corpus.sources() if weights else [corpus]
        self._orders = [DocumentOrder(own, seed, source) for source, own in enumerate(sources)]
        windows = [max(1, own.num_tokens // sequence_length) for own in sources]
        self._rows = [ShuffledRows(seed, rows, source) for source, rows in enumerate(windows)]
        self._mixture = Mixture(weights or (1.0,))
        self._sequence_length = sequence_length
        self._micro_rows = (micro_batch_tokens or 0) // sequence_length
        self.rows_per_batch = global_batch_tokens // sequence_length
        """Rows in the batch of one step, over all data-parallel ranks."""
        self._shift = 0
        # Shuffles are kept between calls, which two threads may not fill at the same time.
        self._lock = threading.Lock()

    def go_on(self, step: int, rows: int) -> None:
        """Let the batch of `step` begin where `rows` rows were read, such as in smaller batches."""
        self._shift = rows - step * self.rows_per_batch

    def rows_before(self, step: int) -> int:
        """How many rows the batches before that of `step` have."""
        return step * self.rows_per_batch + self._shift

    def num_micro_batches(
        self, dp_size: int, *, dp_rank: int = 0, shares: Sequence[int] = ()
    ) -> int:
        """How many micro-batches make up one rank's share of a step.

        Args:
            dp_size: Number of data-parallel ranks.
            dp_rank: Rank of this process among them.
            shares: Rows of each of them, where they differ; empty for as many on each.

        Raises:
            ConfigError: The rows do not divide among the ranks, or the share into micro-batches.
        """
        if shares:
            self._check_shares(dp_size, shares)
            return -(-shares[dp_rank] // (self._micro_rows or max(shares)))
        _check_whole("rows of a batch over data-parallel ranks", self.rows_per_batch, dp_size)
        local_rows = self.rows_per_batch // dp_size
        micro_rows = self._micro_rows or local_rows
        _check_whole("rows of a data-parallel rank over micro-batches", local_rows, micro_rows)
        return local_rows // micro_rows

    def batch(
        self,
        step: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro: int = 0,
        shares: Sequence[int] = (),
    ) -> Batch:
        """Micro-batch `micro` of rank `dp_rank` of `dp_size` in the batch of `step`, from 0.

        With unequal `shares` the last micro-batches of a rank may have one row less.

        Raises:
            ConfigError: There is no such rank or micro-batch, or the rows do not divide.
        """
        num_micro = self.num_micro_batches(
            dp_size, dp_rank=min(max(dp_rank, 0), dp_size - 1), shares=shares
        )
        if not (step >= 0 and 0 <= dp_rank < dp_size and 0 <= micro < num_micro):
            raise ConfigError(
                "TrainBatches.batch",
                found=f"step {step}, dp_rank {dp_rank} of {dp_size}, micro {micro} of {num_micro}",
                why="Steps, ranks and micro-batches count from 0.",
                fix="Pass numbers from 0 to one less than there are.",
            )
        equal = (self.rows_per_batch // dp_size,) * dp_size
        local = dealt_rows(shares or equal)[dp_rank]
        layout = Layout.balanced(len(local), num_micro)
        first = self.rows_before(step)
        segments: list[DocumentSlice] = []
        with self._lock:
            for index in (local[i] for i in layout.positions(micro)):
                order, start = self._row(first + index)
                segments += order.segments(start, start + self._sequence_length)
        return pack(self._corpus, segments)

    def num_targets(self, step: int) -> int:
        """Targets in the whole global batch of `step`: what a mean over it divides by.

        Counted without reading the batch, so no rank has to ask the others.
        """
        length = self._sequence_length
        first = self.rows_before(step)
        with self._lock:
            rows = (self._row(first + n) for n in range(self.rows_per_batch))
            num_ends = sum(order.num_ends(start, start + length) for order, start in rows)
        return self.rows_per_batch * length - num_ends

    def epochs(self, steps: int) -> list[float]:
        """How often the first `steps` steps read each source, all of it together being one."""
        rows = self._mixture.counts(steps * self.rows_per_batch)
        return [
            count * self._sequence_length / order.num_tokens
            for count, order in zip(rows, self._orders, strict=True)
        ]

    def _row(self, number: int) -> tuple[DocumentOrder, int]:
        """The stream that a row of the run is cut from, and where it begins there."""
        source, index = self._mixture.place(number)
        return self._orders[source], self._rows[source].row(index) * self._sequence_length

    def _check_shares(self, dp_size: int, shares: Sequence[int]) -> None:
        if len(shares) == dp_size and sum(shares) == self.rows_per_batch and min(shares) > 0:
            return
        raise ConfigError(
            f"TrainBatches: shares {tuple(shares)}",
            found=f"{dp_size} data-parallel ranks and {self.rows_per_batch} rows in a batch",
            why="Each rank takes at least one row, and all rows are taken once.",
            fix="Give one number of at least 1 for each rank, the rows of a batch in all.",
        )


def dealt_rows(shares: Sequence[int]) -> list[list[int]]:
    """Places in a batch of the rows of each rank, ascending; rank r has `shares[r]` of them.

    Each rank's rows are spread evenly over the batch; with equal shares they are dealt in turn.
    """
    turns = sorted(
        (Fraction(2 * i + 1, share), rank)
        for rank, share in enumerate(shares)
        for i in range(share)
    )
    rows: list[list[int]] = [[] for _ in shares]
    for place, (_, rank) in enumerate(turns):
        rows[rank].append(place)
    return rows


def evaluation_batches(
    corpus: TokenCorpus,
    *,
    sequence_length: int,
    batch_tokens: int,
    max_tokens: int | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> Iterator[Batch]:
    """The first `max_tokens` held-out tokens, each target on exactly one data-parallel rank.

    The documents come in a fixed, mixed order, so the first tokens are a sample of all of them.
    Every rank gets as many batches of one size: what is missing is filled with rows that predict
    nothing, so ranks that meet in collectives stay in step. A corpus without documents gives
    no batch.

    Args:
        corpus: The held-out split.
        sequence_length: Tokens in a row.
        batch_tokens: Tokens in one batch of one rank, a multiple of `sequence_length`.
        max_tokens: Most tokens to read; None for all there are.
        dp_rank: Rank of this process among the data-parallel ranks.
        dp_size: Number of data-parallel ranks.

    Raises:
        ConfigError: `batch_tokens` is no multiple of `sequence_length`.
    """
    _check_whole("evaluation_batches: batch_tokens", batch_tokens, sequence_length)
    num_tokens = corpus.num_tokens if max_tokens is None else min(max_tokens, corpus.num_tokens)
    num_rows = -(-num_tokens // sequence_length)
    rows_per_batch = batch_tokens // sequence_length
    order = DocumentOrder(corpus, _EVALUATION_SEED)
    for first in range(0, num_rows, rows_per_batch * dp_size):
        segments: list[DocumentSlice] = []
        for row in range(first + dp_rank, first + rows_per_batch * dp_size, dp_size):
            start = min(row * sequence_length, num_tokens)
            stop = min(start + sequence_length, num_tokens)
            segments += order.segments(start, stop)
            if stop - start < sequence_length:
                filling = sequence_length - (stop - start)
                segments.append(DocumentSlice(PADDING, filling, ends_document=True))
        yield pack(corpus, segments)


def _check_whole(asked: str, size: int, part: int) -> None:
    if size % part:
        raise ConfigError(
            asked,
            found=f"{size}, which is no multiple of {part}",
            why="Batches consist of whole rows, and every rank computes as many of them.",
            fix="Choose sizes that divide; `validate` names the key.",
        )


class ShuffledRows:
    """A shuffle of the rows of each window of the stream; a permutation of all rows.

    Neighbouring rows of the stream are mostly of one document, and a batch of one document says
    little about the others. So the rows of a window, which is about an epoch long, are mixed. A
    batch stays a function of the seed and its index, and nothing is stored to go on.

    Args:
        seed: Decides the order, in [0, 2**64).
        window: Rows that are mixed with each other, at least 1.
        source: Number of the source, whose order is then its own.
    """

    def __init__(self, seed: int, window: int, source: int = 0) -> None:
        self._seed, self._window, self._source = seed, window, source
        self._windows: dict[int, NDArray[np.int64]] = {}

    def row(self, index: int) -> int:
        """Which row of the stream is the `index`-th to be read; a pure function of the seed."""
        window, within = divmod(index, self._window)
        return window * self._window + int(self._order(window)[within])

    def _order(self, window: int) -> NDArray[np.int64]:
        if window not in self._windows:
            # The counter sets it apart from the order of the documents, which has the same key.
            key = np.array([self._seed, window], dtype=np.uint64)
            counter = np.array([0, 0, self._source, 1], dtype=np.uint64)
            bits = np.random.Philox(key=key, counter=counter)
            order = np.argsort(bits.random_raw(self._window), kind="stable")
            # A batch touches two windows at most, unless the corpus is smaller than the batch.
            while len(self._windows) >= 2:
                self._windows.pop(next(iter(self._windows)))
            self._windows[window] = order
        return self._windows[window]


class DocumentOrder:
    """Where each token of the stream stands in the corpus, found without reading what is before.

    All epochs are as long, so a position in the stream names its epoch, and the order of an epoch
    follows from `seed` and its number alone.

    Args:
        corpus: The documents, at least one.
        seed: Decides the order of every epoch, in [0, 2**64).
        source: Number of the source, whose order is then its own.
    """

    def __init__(self, corpus: TokenCorpus, seed: int, source: int = 0) -> None:
        self._corpus, self.num_tokens = corpus, corpus.num_tokens
        self._seed, self._source = seed, source
        self._lengths = np.diff(corpus.offsets)
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def segments(self, start: int, stop: int) -> Iterator[DocumentSlice]:
        """The parts of documents that make up the positions `start` to `stop` of the stream."""
        while start < stop:
            epoch, offset = divmod(start, self.num_tokens)
            documents, ends = self._epoch(epoch)
            index = int(np.searchsorted(ends, offset, side="right"))
            left = int(ends[index]) - offset
            length = min(left, stop - start)
            document_end = int(self._corpus.offsets[documents[index] + 1])
            yield DocumentSlice(document_end - left, length, ends_document=length == left)
            start += length

    def num_ends(self, start: int, stop: int) -> int:
        """How many documents end at the positions `start` to `stop`: a few look-ups, no reading."""
        return self._ends_before(stop) - self._ends_before(start)

    def _ends_before(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_tokens)
        _, ends = self._epoch(epoch)
        within = int(np.searchsorted(ends, offset, side="right"))
        return epoch * self._corpus.num_documents + within

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's documents in order, and the position within it where each one ends."""
        if epoch not in self._epochs:
            # numpy keeps the raw numbers of a bit generator stable over versions, but not
            # `permutation`, so the order is that of the raw numbers.
            key = np.array([self._seed, epoch], dtype=np.uint64)
            counter = np.array([0, 0, self._source, 0], dtype=np.uint64)
            bits = np.random.Philox(key=key, counter=counter)
            documents = np.argsort(bits.random_raw(len(self._lengths)), kind="stable")
            # A batch touches two epochs at most, unless the corpus is smaller than the batch.
            while len(self._epochs) >= 2:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = documents, np.cumsum(self._lengths[documents])
        return self._epochs[epoch]


def pack(corpus: TokenCorpus, segments: Sequence[DocumentSlice]) -> Batch:
    """The batch that consists of `segments`, one after the other.

    Raises:
        ConfigError: A token is none of the vocabulary: its file has been damaged.
    """
    cu_seqlens = [0]
    for segment in segments:
        cu_seqlens.append(cu_seqlens[-1] + segment.length)
    tokens = np.full(cu_seqlens[-1], corpus.end_id, dtype=np.int64)
    targets = np.full(cu_seqlens[-1], IGNORE, dtype=np.int64)
    for segment, begin, end in zip(segments, cu_seqlens, cu_seqlens[1:], strict=False):
        if segment.start == PADDING:
            continue
        stop = segment.start + segment.length
        tokens[begin:end] = corpus.tokens[segment.start : stop]
        # A document that goes on in the next row gives this row its last target as well.
        known = segment.length - 1 if segment.ends_document else segment.length
        targets[begin : begin + known] = corpus.tokens[segment.start + 1 : stop + 1][:known]
    num_ids = len(corpus.bytes_per_id)
    if (largest := max(tokens.max(initial=0), targets.max(initial=0))) >= num_ids:
        raise ConfigError(
            "tokens of the run",
            found=f"the id {largest}, and a vocabulary of {num_ids}",
            why="The file of the tokens has changed since it was written.",
            fix="Start the run again: its first rank compares the files with their checksums.",
        )
    predicted = targets[targets != IGNORE]
    return Batch(
        tokens=tokens,
        targets=targets,
        cu_seqlens=tuple(cu_seqlens),
        num_bytes=int(corpus.bytes_per_id[predicted].sum(dtype=np.int64)),
    )


def padded(batch: Batch, multiple: int) -> Batch:
    """`batch` with a document of ignored targets behind it, so that `multiple` divides its tokens.

    Args:
        batch: Tokens of any number.
        multiple: Number of ranks that have to hold as many tokens each.

    Returns:
        `batch` itself where nothing is missing.
    """
    missing = -len(batch.tokens) % multiple
    if not missing:
        return batch
    # Any id will do: the document is read by no other, and nothing is learnt from it.
    return Batch(
        tokens=np.concatenate([batch.tokens, np.zeros(missing, np.int64)]),
        targets=np.concatenate([batch.targets, np.full(missing, IGNORE, np.int64)]),
        cu_seqlens=(*batch.cu_seqlens, batch.cu_seqlens[-1] + missing),
        num_bytes=batch.num_bytes,
    )
