"""Rows of a batch for replicas that take unequal shares, and what fills up a micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration_support.short_runs import tiny_config
from pcomm.core import Topology
from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.sections import ParallelConfig
from pcomm.integration.config.units import units_of_model
from pcomm.integration.data.batches import IGNORE, Batch, dealt_rows, padded
from pcomm.integration.replicas import RunPlace
from pcomm.ntp import Failures, Policy, plan


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_row_is_dealt_once_and_evenly(shares):
    rows = dealt_rows(shares)
    assert sorted(row for own in rows for row in own) == list(range(sum(shares)))
    for own, share in zip(rows, shares, strict=True):
        assert len(own) == share
        assert own == sorted(own)
        # One in each of as many equal parts of the batch, give or take the others' turns.
        ideal = [(i + 0.5) / share * sum(shares) for i in range(share)]
        assert max(abs(a - b) for a, b in zip(own, ideal, strict=True)) <= len(shares)


@pytest.mark.parametrize(("replicas", "each"), [(1, 5), (2, 3), (3, 4)])
def test_equal_shares_are_dealt_in_turn(replicas, each):
    rows = dealt_rows([each] * replicas)
    assert rows == [list(range(r, replicas * each, replicas)) for r in range(replicas)]


@pytest.mark.parametrize(("tokens", "multiple", "total"), [(6, 3, 6), (7, 3, 9), (1, 4, 4)])
def test_a_document_of_ignored_targets_fills_up(tokens, multiple, total):
    batch = Batch(np.arange(tokens) + 5, np.arange(tokens) + 6, (0, tokens), 11)
    filled = padded(batch, multiple)
    assert (filled is batch) == (tokens == total)
    assert len(filled.tokens) == len(filled.targets) == filled.cu_seqlens[-1] == total
    np.testing.assert_array_equal(filled.tokens[:tokens], batch.tokens)
    np.testing.assert_array_equal(filled.targets[:tokens], batch.targets)
    assert (filled.targets[tokens:] == IGNORE).all()
    # A document of its own, so that no token of the others sees it or is seen from it.
    assert filled.cu_seqlens == (0, tokens, total)[: 2 + (total > tokens)]
    assert filled.num_bytes == 11


def test_a_replica_without_ranks_is_not_counted():
    asked = tiny_config(ParallelConfig(dp=3, tp=2), global_batch_tokens=288)
    config = validate_resilient(asked, 6)
    topology = Topology({"dp": 3, "cp": 1, "tp": 2})
    gone, units = Failures.from_global_ranks([0, 1]), units_of_model(config.model, 320)
    made = plan(topology, gone, units, Policy(drops_replicas=True))
    # The fifth rank is the third of those that are left.
    everyone: Any = SimpleNamespace(rank=2, ranks=(2, 3, 4, 5))
    place = RunPlace.planned(config, made, everyone)
    assert (place.replica, place.num_replicas, place.tp, place.rank) == (1, 2, 0, 4)
    assert len(place.shares) == 2
