"""Batches for training and for evaluation, found by their index: to resume is to go on counting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from pcomm.core import Layout
from pcomm.core.errors import ConfigError
from pcomm.integration.data.document_order import DocumentOrder
from pcomm.integration.data.packing import PADDING, Batch, Segment, pack
from pcomm.integration.data.row_order import RowOrder
from pcomm.integration.data.token_cache import TokenCorpus

__all__ = ["TrainBatches", "dealt_rows", "evaluation_batches"]

# Fixed, so that every evaluation of a corpus reads the same documents.
_EVALUATION_SEED = 0


class TrainBatches:
    """The training batches of a run. Batch i depends on the corpus, `seed` and i alone.

    The stream of documents is cut into rows, which are mixed (see `RowOrder`); the global batch
    of step i is the next `rows_per_batch` of them. Data-parallel rank r of n has every n-th from
    the r-th on, so the ranks share a batch without overlap, and the batch is the same for every n.
    Ranks that take unequal shares of it are dealt its rows by `dealt_rows`.

    Args:
        corpus: The train split.
        seed: Decides the order of the documents.
        sequence_length: Tokens in a row.
        global_batch_tokens: Tokens in the batch of one step, over all data-parallel ranks.
        micro_batch_tokens: Tokens that one rank computes at once; None for its whole share.

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
    ) -> None:
        _check_whole("train.global_batch_tokens", global_batch_tokens, sequence_length)
        _check_whole("train.micro_batch_tokens", micro_batch_tokens or 0, sequence_length)
        self._corpus = corpus
        self._order = DocumentOrder(corpus, seed)
        self._rows = RowOrder(seed, max(1, corpus.num_tokens // sequence_length))
        self._sequence_length = sequence_length
        self._micro_rows = (micro_batch_tokens or 0) // sequence_length
        self.rows_per_batch = global_batch_tokens // sequence_length
        """Rows in the batch of one step, over all data-parallel ranks."""

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
        first = step * self.rows_per_batch
        segments: list[Segment] = []
        for index in (local[i] for i in layout.positions(micro)):
            start = self._rows.row(first + index) * self._sequence_length
            segments += self._order.segments(start, start + self._sequence_length)
        return pack(self._corpus, segments)

    def num_targets(self, step: int) -> int:
        """Targets in the whole global batch of `step`: what a mean over it divides by.

        Counted without reading the batch, so no rank has to ask the others.
        """
        length = self._sequence_length
        first = step * self.rows_per_batch
        starts = (self._rows.row(first + n) * length for n in range(self.rows_per_batch))
        num_ends = sum(self._order.num_ends(start, start + length) for start in starts)
        return self.rows_per_batch * length - num_ends

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
        segments: list[Segment] = []
        for row in range(first + dp_rank, first + rows_per_batch * dp_size, dp_size):
            start = min(row * sequence_length, num_tokens)
            stop = min(start + sequence_length, num_tokens)
            segments += order.segments(start, stop)
            if stop - start < sequence_length:
                filling = sequence_length - (stop - start)
                segments.append(Segment(PADDING, filling, ends_document=True))
        yield pack(corpus, segments)


def _check_whole(asked: str, size: int, part: int) -> None:
    if size % part:
        raise ConfigError(
            asked,
            found=f"{size}, which is no multiple of {part}",
            why="Batches consist of whole rows, and every rank computes as many of them.",
            fix="Choose sizes that divide; `validate` names the key.",
        )
