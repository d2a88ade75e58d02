"""Batches that a thread reads ahead are those that are read when asked for; and pinned uploads."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from pcomm.core.errors import ConfigError
from pcomm.integration.data.batches import Batch, TrainBatches
from pcomm.integration.data.inputs import DeviceBatch, ReadAhead
from pcomm.integration.data.token_cache import TokenCorpus

ROWS, LENGTH = 8, 4
NAME = "pcomm reads batches"


def batches() -> TrainBatches:
    lengths = np.random.default_rng(0).integers(1, 9, 40)
    tokens = np.arange(lengths.sum()).astype(np.uint16) % 50
    corpus = TokenCorpus(tokens, np.append(0, lengths.cumsum()), np.ones(50, np.int32), 49)
    return TrainBatches(
        corpus,
        seed=1,
        sequence_length=LENGTH,
        global_batch_tokens=ROWS * LENGTH,
        micro_batch_tokens=2 * LENGTH,
    )


def reader_threads() -> int:
    gc.collect()
    return sum(thread.name.startswith(NAME) for thread in threading.enumerate())


def assert_same(found: Batch, expected: Batch) -> None:
    assert_array_equal(found.tokens, expected.tokens)
    assert_array_equal(found.targets, expected.targets)
    assert (found.cu_seqlens, found.num_bytes) == (expected.cu_seqlens, expected.num_bytes)


class Watched(TrainBatches):
    """Notes which thread reads which batch."""

    def batch(self, step: int, **asked: Any) -> Batch:
        name = threading.current_thread().name.partition("_")[0]
        self.__dict__.setdefault("read", []).append((step, asked["micro"], name))
        return super().batch(step, **asked)


def test_each_batch_is_what_it_is_without_and_is_read_once_by_the_thread() -> None:
    plain, watched = batches(), batches()
    watched.__class__ = Watched
    ahead = ReadAhead(watched)
    for step in range(4):
        for micro in range(2):
            asked: Any = {"dp_rank": 1, "dp_size": 2, "micro": micro, "shares": ()}
            assert_same(ahead.batch(step, **asked), plain.batch(step, **asked))
            assert ahead._next is not None
            ahead._next[1].result()
    places = [(step, micro) for step in range(4) for micro in range(2)]
    read = watched.__dict__["read"]
    assert [one[:2] for one in read] == [*places, (4, 0)]
    assert {name for *_, name in read[1:]} == {NAME}


def test_unequal_shares_a_jump_and_other_rows_are_read_anew() -> None:
    plain, own = batches(), batches()
    ahead = ReadAhead(own)
    shares = (3, 5)
    cases: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ()), (3, 1, ()), (3, 2, shares)]
    for step, micro, given in [*cases, (0, 0, shares), (0, 1, shares)]:
        asked: Any = {"dp_rank": 1, "dp_size": 2, "micro": micro, "shares": given}
        assert_same(ahead.batch(step, **asked), plain.batch(step, **asked))
    for one in (plain, own):
        one.go_on(1, 3 * ROWS)
    asked = {"dp_rank": 1, "dp_size": 2, "micro": 2, "shares": shares}
    assert_same(ahead.batch(0, **asked), plain.batch(0, **asked))


def test_targets_are_counted_while_the_thread_reads() -> None:
    plain, own = batches(), batches()
    ahead, asked = ReadAhead(own), {"dp_rank": 0, "dp_size": 1, "shares": ()}
    for step in range(60):
        for micro in range(4):
            ahead.batch(step, micro=micro, **asked)  # type: ignore[arg-type]
        assert own.num_targets(step) == plain.num_targets(step)


def test_an_error_is_raised_where_the_batch_is_asked_for() -> None:
    own = batches()
    ahead = ReadAhead(own)
    asked: Any = {"dp_rank": 0, "dp_size": 1, "shares": ()}
    ahead.batch(0, micro=0, **asked)
    assert ahead._next is not None
    ahead._next[1].result()
    own._corpus.bytes_per_id.resize(3, refcheck=False)
    # What was read by then is whole, and what comes after is not.
    ahead.batch(0, micro=1, **asked)
    with pytest.raises(ConfigError, match="a vocabulary of 3"):
        ahead.batch(0, micro=2, **asked)
    with pytest.raises(ConfigError, match="micro 4 of 4"):
        ahead.batch(0, micro=4, **asked)


def test_the_thread_ends_with_its_reader() -> None:
    before = reader_threads()
    for _ in range(5):
        ReadAhead(batches()).batch(0, dp_rank=0, dp_size=1, micro=0, shares=())
    end = time.monotonic() + 30
    while reader_threads() > before:
        assert time.monotonic() < end, "a reader's thread is left"
        time.sleep(0.01)


class Pinned:
    """In the place of a tensor of the host, of which no GPU is there to pin memory for."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def pin_memory(self) -> Pinned:
        self.told.append("pinned")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> str:
        self.told.append(f"sent, {non_blocking=}")
        return str(device)


class OneRank:
    """In the place of a plan."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def shard(self, tensor: torch.Tensor) -> Any:
        return Pinned(self.told)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_gpu_gets_its_tokens_from_pinned_memory(kind: str) -> None:
    told: list[str] = []
    batch = batches().batch(0)
    found = DeviceBatch.of(batch, OneRank(told), torch.device(kind))  # type: ignore[arg-type]
    each = ["pinned"] * (kind == "cuda") + ["sent, non_blocking=True"]
    assert told == 2 * each
    assert found[:2] == (kind, kind)
