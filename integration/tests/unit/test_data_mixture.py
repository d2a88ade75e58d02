"""Mixtures: each source has its share at any time, and a row depends on its number alone."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, DataConfig
from pcomm.integration.config.toml import load_config, to_toml
from pcomm.integration.data.batches import Mixture, TrainBatches
from pcomm.integration.data.preparation import open_prepared, prepare
from pcomm.integration.data.token_cache import TokenCorpus
from pcomm.integration.train.loop import describe_run

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 9).map(float), st.floats(5e-324, 1.7e308)), min_size=1, max_size=7
)
COMMON = settings(max_examples=60, deadline=None)


@COMMON
@given(weights=WEIGHTS, first=st.integers(0, 10**12))
def test_each_source_is_near_its_share_and_each_row_has_one_source(weights, first):
    mixture, total = Mixture(weights), sum(map(Fraction, weights))
    counts = mixture.counts(first)
    for row in range(first, first + 40):
        source, index = mixture.place(row)
        assert index == counts[source]
        counts[source] += 1
        assert mixture.counts(row + 1) == counts
        assert sum(counts) == row + 1
        most = max(Fraction(1), Fraction(len(weights), 2))
        for own, weight in zip(counts, weights, strict=True):
            assert abs(own - (row + 1) * Fraction(weight) / total) <= most


# Lengths of documents of three sources; the last has less than a row in all.
SOURCES = ([5, 30, 11, 2, 40], [70, 1, 9], [3])
LENGTH = 8


def _corpus() -> TokenCorpus:
    lengths = [length for source in SOURCES for length in source]
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    # Each token is unique, and tells where it came from.
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint16)
    counts = tuple(map(len, SOURCES))
    return TokenCorpus(tokens, offsets, np.ones(len(tokens) + 1, np.int32), 0, counts)


def _batches(weights=(), corpus=None, rows=12):
    return TrainBatches(
        corpus or _corpus(),
        seed=3,
        sequence_length=LENGTH,
        global_batch_tokens=rows * LENGTH,
        weights=weights,
    )


def _sources_of(tokens):
    ends = np.cumsum([sum(source) for source in SOURCES])
    return np.searchsorted(ends, tokens, side="left")


def test_rows_are_of_one_source_and_come_in_shares_by_weight():
    batches = _batches((5.0, 2.0, 1.0))
    tokens = np.concatenate([batches.batch(step).tokens for step in range(40)]).reshape(-1, LENGTH)
    sources = _sources_of(tokens)
    assert (sources == sources[:, :1]).all()
    assert np.bincount(sources[:, 0]).tolist() == [300, 120, 60]
    # Every token of a source is read as often, but for what the last epoch has not come to.
    assert batches.epochs(40) == [300 * 8 / 88, 120 * 8 / 80, 60 * 8 / 3]
    for source in range(3):
        own = tokens[sources[:, 0] == source]
        times = np.unique(own, return_counts=True)[1]
        assert len(times) == sum(SOURCES[source])
        assert times.max() - times.min() <= 2
    for step in range(40):
        batch = batches.batch(step)
        assert batches.num_targets(step) == int((batch.targets != -100).sum())


@pytest.mark.parametrize("dp", [1, 2, 3, 12])
def test_the_batch_of_a_mixture_is_the_same_on_any_number_of_ranks_and_after_a_resume(dp):
    def rows(batches, step, size):
        # Rank r of n has every n-th row from the r-th on.
        parts = [batches.batch(step, dp_rank=r, dp_size=size).tokens for r in range(size)]
        rows = [part.reshape(-1, LENGTH) for part in parts]
        return np.stack(rows, axis=1).reshape(-1, LENGTH).tolist()

    whole = _batches((0.7, 0.2, 0.1))
    expected = [whole.batch(step).tokens.reshape(-1, LENGTH).tolist() for step in range(9)]
    for step in (8, 3, 5):
        assert rows(_batches((0.7, 0.2, 0.1)), step, dp) == expected[step]


def test_a_mixture_of_one_source_reads_what_a_corpus_without_weights_reads():
    alone = replace(_corpus(), source_documents=(sum(map(len, SOURCES)),))
    for step in range(30):
        one, other = _batches((0.3,), alone).batch(step), _batches().batch(step)
        assert (one.tokens == other.tokens).all()
        assert one.cu_seqlens == other.cu_seqlens


def test_sources_of_equal_documents_are_in_orders_of_their_own():
    corpus = _corpus()
    twice = TokenCorpus(
        np.arange(1, 2001, dtype=np.uint16),
        np.arange(0, 2001, 10, dtype=np.int64),
        np.ones(2001, np.int32),
        0,
        (100, 100),
    )
    tokens = _batches((1.0, 1.0), twice, rows=100).batch(0).tokens.reshape(-1, LENGTH)
    first, second = tokens[tokens[:, 0] <= 1000], tokens[tokens[:, 0] > 1000] - 1000
    assert len(first) == len(second) == 50
    assert first.tolist() != second.tolist()
    assert corpus.sources()[1].num_tokens == 80


def _write(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return str(folder)


def test_each_source_is_split_and_counted_by_itself(tmp_path):
    many = _write(tmp_path / "z-many", [f"word{n} " * (n + 9) for n in range(20)])
    one = _write(tmp_path / "a-one", ["a line of the only text\n" * 40])
    two = _write(tmp_path / "two", ["first text", "second text"])
    data = DataConfig(path=(many, one, two), weights=(1, 1, 2), vocabulary=300, held_out=0.2)
    prepared = prepare(data, tmp_path / "run")
    sources = prepared.train.sources()
    texts = [
        [
            prepared.tokenizer.decode(own.tokens[a:b].tolist())
            for a, b in zip(own.offsets, own.offsets[1:], strict=False)
        ]
        for own in sources
    ]
    assert [len(own) for own in texts] == [prepared.train.num_documents - 2, 1, 1]
    assert all(text.startswith("word") for text in texts[0])
    assert texts[1][0] == "a line of the only text\n" * 32
    assert texts[2][0] in ("first text", "second text")
    config = validate(load_config(overrides=["train.steps=5"], base=Config(data=data)), 1)
    said = describe_run(config, open_prepared(tmp_path / "run")).splitlines()
    tokens = sources[2].num_tokens
    rows = 5 * 32 // 2
    assert said[3] == (
        f"50.0% of the rows from {two}: 1 documents of {tokens:,} tokens, "
        f"{rows * 256 / tokens:.2f} epochs"
    )
    empty = _write(tmp_path / "empty", [" \n"])
    data = replace(data, path=(many, one, empty))
    with pytest.raises(ConfigError, match=rf"{empty}: 1 documents in 1 files, and no text"):
        prepare(data, tmp_path / "other")


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        ("[1]", "1 weights, and 2 entries of data.path"),
        ("[1, 2, 3]", "3 weights, and 2 entries"),
        ("[1, 0]", "item 1: Input should be greater than 0"),
        ("[-1, 2]", "item 0: Input should be greater than 0"),
        ("[1, nan]", "item 1: Input should be a finite number"),
        ("[inf, 1]", "item 0: Input should be a finite number"),
        ('["1", 2]', "item 0: Input should be a valid number"),
        ("3", "data.weights"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, part):
    with pytest.raises(ConfigError, match=r"data\.weights") as raised:
        validate(load_config(overrides=['data.path=["a", "b"]', f"data.weights={weights}"]), 1)
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.encoding=utf-7.5", "unknown encoding: utf-7.5"),
        ("data.encoding=rot13", "is not a text encoding"),
        ("data.text_suffixes=txt", "data.text_suffixes"),
        ('data.text_suffixes=[".txt", ".JSONL"]', "the ending '.JSONL'"),
        ("data.errors=loud", "data.errors"),
    ],
)
def test_readings_that_mean_nothing_are_refused(override, part):
    with pytest.raises(ConfigError) as raised:
        validate(load_config(overrides=[override]), 1)
    assert part in str(raised.value)


def test_the_keys_survive_a_file(tmp_path):
    config = load_config(
        overrides=['data.path=["a", "b"]', "data.weights=[3, 0.25]", "data.text_suffixes=.log"]
    )
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    assert config.data.weights == (3.0, 0.25)
