"""Packing, order and sharing of batches, against a corpus in which every token is unique.

Token `t` of the test corpus stands at place `t - 1`, so a batch tells where each token came from,
and a target that crosses a document's end cannot pass for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
from pcomm.integration.data.batches import (
    IGNORE,
    Batch,
    DocumentOrder,
    DocumentSlice,
    ShuffledRows,
    TrainBatches,
    evaluation_batches,
    pack,
)
from pcomm.integration.data.token_cache import TokenCorpus

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
COMMON = settings(max_examples=40, deadline=None)
FILLING = 0


def _corpus(lengths: Sequence[int]) -> TokenCorpus:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint16)
    # Any bytes per id will do, if they differ.
    bytes_per_id = (np.arange(offsets[-1] + 1, dtype=np.int32) * 7) % 11
    return TokenCorpus(tokens, offsets, bytes_per_id, end_id=FILLING)


def _violations(corpus: TokenCorpus, batch: Batch) -> set[str]:
    """What a batch does wrong, judged from the corpus alone, token by token."""
    wrong = set()
    last = set(corpus.offsets[1:].tolist())
    document = np.searchsorted(corpus.offsets, np.arange(corpus.num_tokens + 1), side="left")
    borders = batch.cu_seqlens
    if (
        borders[0] != 0
        or borders[-1] != len(batch.tokens)
        or any(a >= b for a, b in pairwise(borders))
    ):
        wrong.add("borders")
    for start, stop in pairwise(borders):
        tokens = batch.tokens[start:stop]
        if len(set(document[tokens])) > 1:
            wrong.add("two documents in a segment")
        elif tokens[0] != FILLING and tokens.tolist() != list(range(tokens[0], tokens[-1] + 1)):
            wrong.add("tokens out of order")
    for token, target in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        if target != (IGNORE if token == FILLING or token in last else token + 1):
            wrong.add("a target of another document" if token in last else "a wrong target")
    targets = [target for target in batch.targets.tolist() if target != IGNORE]
    if batch.num_bytes != sum(int(corpus.bytes_per_id[target]) for target in targets):
        wrong.add("number of bytes")
    return wrong


def _num_targets(batch: Batch) -> int:
    return int((batch.targets != IGNORE).sum())


def _rows(batches: Sequence[Batch], length: int) -> list[tuple[int, ...]]:
    tokens = np.concatenate([batch.tokens for batch in batches])
    return [tuple(row) for row in tokens.reshape(-1, length).tolist()]


@COMMON
@given(
    lengths=LENGTHS,
    length=st.integers(1, 24),
    rows=st.integers(1, 5),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 10**6),
)
def test_no_batch_predicts_across_a_document(lengths, length, rows, seed, step):
    corpus = _corpus(lengths)
    batches = TrainBatches(
        corpus, seed=seed, sequence_length=length, global_batch_tokens=rows * length
    )
    batch = batches.batch(step)
    assert _violations(corpus, batch) == set()
    assert len(batch.tokens) == rows * length
    assert set(range(0, rows * length, length)) <= set(batch.cu_seqlens)
    assert batches.num_targets(step) == _num_targets(batch)


LEAK = TrainBatches(_corpus([5, 7, 3, 9]), seed=1, sequence_length=8, global_batch_tokens=32)


def _leak_targets(batch: Batch) -> Batch:
    """The mistake of cutting one long stream: the end predicts the next document's beginning."""
    following = np.append(batch.tokens[1:], IGNORE)
    ended = (batch.targets == IGNORE) & (following != IGNORE)
    leaking = np.where(ended, following, batch.targets)
    return replace(batch, targets=leaking)


MUTANTS = {
    "a target of another document": _leak_targets,
    "two documents in a segment": lambda b: replace(b, cu_seqlens=(*range(0, 33, 8),)),
    "borders": lambda b: replace(b, cu_seqlens=b.cu_seqlens[:-1]),
    "tokens out of order": lambda b: replace(b, tokens=b.tokens - (np.arange(32) == 1)),
    "a wrong target": lambda b: replace(b, targets=np.full(32, IGNORE)),
    "number of bytes": lambda b: replace(b, num_bytes=b.num_bytes + 1),
}


@pytest.mark.parametrize("mistake", MUTANTS)
def test_the_check_above_notices(mistake):
    batch = LEAK.batch(0)
    assert _violations(_corpus([5, 7, 3, 9]), batch) == set()
    assert mistake in _violations(_corpus([5, 7, 3, 9]), MUTANTS[mistake](batch))


@COMMON
@given(lengths=LENGTHS, length=st.integers(1, 24), seed=st.integers(0, 2**64 - 1))
def test_each_epoch_of_the_stream_holds_every_document_once(lengths, length, seed):
    corpus = _corpus(lengths)
    order = DocumentOrder(corpus, seed)
    starts = range(0, 3 * corpus.num_tokens, length)
    segments = [part for start in starts for part in order.segments(start, start + length)]
    stream = np.concatenate([corpus.tokens[s.start : s.start + s.length] for s in segments])
    for epoch in range(3):
        tokens = stream[epoch * corpus.num_tokens : (epoch + 1) * corpus.num_tokens]
        assert sorted(tokens) == corpus.tokens.tolist()
        firsts = {int(offset) + 1 for offset in corpus.offsets[:-1]}
        jumps = {int(b) for a, b in pairwise(tokens) if b != a + 1}
        assert jumps <= firsts


@COMMON
@given(window=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), first=st.integers(0, 200))
def test_the_rows_of_a_window_are_read_once_each(window, seed, first):
    order = ShuffledRows(seed, window)
    # Asked for out of turn, as a resumed run does.
    assert order.row(first) // window == first // window
    for number in range(3):
        rows = range(number * window, (number + 1) * window)
        assert sorted(order.row(index) for index in rows) == list(rows)


def test_a_batch_mixes_documents():
    """Neighbouring rows of the stream are of one document, and learning from one is poor."""
    corpus = _corpus([80] * 10)
    batches = TrainBatches(corpus, seed=0, sequence_length=8, global_batch_tokens=64)
    for step in range(10):
        documents = {int(token - 1) // 80 for token in batches.batch(step).tokens[::8]}
        assert len(documents) >= 4


def test_epochs_and_seeds_differ_in_order():
    corpus = _corpus([3] * 50)

    def epoch(seed, number):
        batches = TrainBatches(corpus, seed=seed, sequence_length=150, global_batch_tokens=150)
        return tuple(batches.batch(number).tokens.tolist())

    orders = {epoch(seed, number) for seed in (0, 1, 2**64 - 1) for number in range(4)}
    assert len(orders) == 12


def test_the_order_of_a_seed_is_the_same_everywhere():
    batches = TrainBatches(_corpus([1] * 8), seed=7, sequence_length=8, global_batch_tokens=8)
    # Written down once: another order would break the resumption of every run.
    assert batches.batch(0).tokens.tolist() == [5, 2, 7, 4, 3, 8, 6, 1]
    assert batches.batch(1).tokens.tolist() == [4, 2, 7, 3, 6, 5, 1, 8]


@COMMON
@given(
    lengths=LENGTHS,
    length=st.integers(1, 16),
    dp_size=st.sampled_from([1, 2, 3, 4, 6]),
    micro_rows=st.sampled_from([0, 1, 2]),
    step=st.integers(0, 1000),
)
def test_ranks_and_micro_batches_share_the_batch(lengths, length, dp_size, micro_rows, step):
    corpus = _corpus(lengths)

    def batches(micro):
        return TrainBatches(
            corpus,
            seed=5,
            sequence_length=length,
            global_batch_tokens=24 * length,
            micro_batch_tokens=micro * length,
        )

    whole = batches(0).batch(step)
    shared = batches(micro_rows)
    parts = [
        [
            shared.batch(step, dp_rank=rank, dp_size=dp_size, micro=micro)
            for micro in range(shared.num_micro_batches(dp_size))
        ]
        for rank in range(dp_size)
    ]
    rows = _rows([whole], length)
    for rank in range(dp_size):
        assert _rows(parts[rank], length) == rows[rank::dp_size]
        assert len({len(part.tokens) for part in parts[rank]}) == 1
    every = [part for rank in parts for part in rank]
    assert all(_violations(corpus, part) == set() for part in every)
    assert sum(map(_num_targets, every)) == shared.num_targets(step)
    assert sum(part.num_bytes for part in every) == whole.num_bytes


def test_a_batch_does_not_depend_on_the_batches_before():
    corpus = _corpus([5, 7, 3, 9])
    shape = {"seed": 3, "sequence_length": 8, "global_batch_tokens": 32}
    straight = TrainBatches(corpus, **shape)
    expected = [straight.batch(step).tokens.tolist() for step in range(20)]
    jumping = TrainBatches(corpus, **shape)
    for step in (19, 0, 7, 13, 2):
        assert jumping.batch(step).tokens.tolist() == expected[step]
        assert TrainBatches(corpus, **shape).batch(step).tokens.tolist() == expected[step]


def test_batches_are_what_torch_takes():
    batch = LEAK.batch(3)
    for array in (batch.tokens, batch.targets):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert array.flags.writeable
    assert all(type(border) is int for border in batch.cu_seqlens)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"step": 0, "dp_size": 2, "shares": (1, 2)}, "2 data-parallel ranks and 4 rows"),
        ({"step": 0, "dp_size": 2, "shares": (4, 0)}, "at least one row"),
        ({"step": 0, "dp_size": 2, "shares": (3, 1), "dp_rank": 1, "micro": 1}, "micro 1 of 1"),
        ({"step": 0, "dp_size": 3}, "4, which is no multiple of 3"),
        ({"step": 0, "dp_size": 2, "dp_rank": 2}, "dp_rank 2 of 2"),
        ({"step": 0, "dp_size": 2, "micro": 1}, "micro 1 of 1"),
        ({"step": -1}, "step -1"),
    ],
)
def test_batches_that_do_not_exist(arguments, part):
    with pytest.raises(ConfigError, match=part):
        LEAK.batch(**arguments)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ({"global_batch_tokens": 30}, "train.global_batch_tokens: 30"),
        ({"global_batch_tokens": 32, "micro_batch_tokens": 12}, "train.micro_batch_tokens: 12"),
    ],
)
def test_batches_that_are_not_whole_rows(shape, part):
    with pytest.raises(ConfigError, match=part):
        TrainBatches(_corpus([5]), seed=0, sequence_length=8, **shape)
    with pytest.raises(ConfigError, match="4, which is no multiple of 3"):
        TrainBatches(
            _corpus([5]), seed=0, sequence_length=8, global_batch_tokens=32, micro_batch_tokens=24
        ).num_micro_batches(1)


@COMMON
@given(
    lengths=LENGTHS,
    length=st.integers(1, 16),
    rows=st.integers(1, 4),
    max_tokens=st.none() | st.integers(1, 300),
    dp_size=st.integers(1, 5),
)
def test_evaluation_counts_every_target_once(lengths, length, rows, max_tokens, dp_size):
    corpus = _corpus(lengths)

    def targets_of(num_ranks):
        ranks = [
            list(
                evaluation_batches(
                    corpus,
                    sequence_length=length,
                    batch_tokens=rows * length,
                    max_tokens=max_tokens,
                    dp_rank=rank,
                    dp_size=num_ranks,
                )
            )
            for rank in range(num_ranks)
        ]
        every = [batch for batches in ranks for batch in batches]
        assert len({len(batches) for batches in ranks}) == 1
        assert {len(batch.tokens) for batch in every} == {rows * length}
        assert all(_violations(corpus, batch) == set() for batch in every)
        assert all(b - a <= length for batch in every for a, b in pairwise(batch.cu_seqlens))
        targets = np.concatenate([batch.targets for batch in every])
        return sorted(targets[targets != IGNORE].tolist())

    targets = targets_of(dp_size)
    assert len(set(targets)) == len(targets)
    assert targets == targets_of(1)
    read = min(max_tokens or corpus.num_tokens, corpus.num_tokens)
    # Every token read predicts one, but for the documents that end among them.
    assert read - len(lengths) <= len(targets) <= read
    if read == corpus.num_tokens:
        assert len(targets) == read - len(lengths)


def test_evaluation_mixes_the_documents():
    corpus = _corpus([4] * 100)
    (batch,) = evaluation_batches(corpus, sequence_length=40, batch_tokens=40, max_tokens=40)
    assert batch.tokens.max() > 100
    assert _num_targets(batch) == 30


def test_an_empty_held_out_split_gives_no_batch():
    assert list(evaluation_batches(_corpus([]), sequence_length=8, batch_tokens=8)) == []


def test_evaluation_batches_are_whole_rows():
    with pytest.raises(ConfigError, match="12, which is no multiple of 8"):
        next(evaluation_batches(_corpus([9]), sequence_length=8, batch_tokens=12))


@pytest.mark.parametrize("place", [0, 3])
def test_an_id_that_the_vocabulary_does_not_have_is_named(place):
    corpus = _corpus([4])
    corpus.tokens[place] = 60_000
    with pytest.raises(ConfigError, match="the id 60000, and a vocabulary of 5"):
        pack(corpus, [DocumentSlice(0, 4, ends_document=True)])
