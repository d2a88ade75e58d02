"""Checksums of ranges of units: equal shards agree, whatever the degree, and others are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntp_support.logical_state import LogicalState, on_living_ranks, state_units
from pcomm.core import Topology
from pcomm.core.errors import DivergenceError
from pcomm.core.groups.open_groups import Groups
from pcomm.ntp import Coord, Failures, plan
from pcomm.ntp.redistribute import agreement as checksums
from pcomm.ntp.redistribute.agreement import differing_units

UNITS = state_units(5)
FC1, OUT = "model.layers.0.fc1.weight", "optimizer.exp_avg.layers.0.out.weight"


def found_by(change=lambda *_: None, *, is_exact=True):
    """What all ranks of two replicas of degrees 3 and 2 find, whose shards `change` spoils."""
    made = plan(Topology({"dp": 2, "tp": 3}), Failures.at(Coord(dp=1, tp=1)), UNITS)
    whole = LogicalState.random(UNITS)

    def task(rank: int, groups: Groups) -> str | None:
        shards = whole.shards(made, rank)
        change(rank, shards)
        return differing_units(
            made,
            groups["all"],
            rank=rank,
            tensors=shards,
            param_layouts=whole.layouts(made, rank),
            is_exact=is_exact,
            device=torch.device("cpu"),
        )

    (text,) = set(on_living_ranks(made, task).values())
    return text


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_shards_of_one_state_agree_and_one_element_is_found(monkeypatch, chunk):
    monkeypatch.setattr(checksums, "_CHUNK", chunk)
    assert found_by() is None

    def last(rank: int, shards: dict[str, Tensor]) -> None:
        if rank == 5:
            shards[OUT][-1, -1] += 1e-4

    # Rank 2 holds these units in the other replica.
    assert "units 3 to 4 of 'optimizer.exp_avg.layers.0.out.weight'" in str(found_by(last))


def test_rows_at_each_others_place_are_found_and_the_rank_is_named() -> None:
    def swap(rank: int, shards: dict[str, Tensor]) -> None:
        if rank == 0:
            gate = shards[FC1]
            gate[[0, 1]] = gate[[1, 0]]

    text = str(found_by(swap, is_exact=False))
    assert FC1 in text
    assert "ranks [0]" in text or "ranks [3]" in text


@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("by", "is_found"), [(1e-5, False), (1e-2, True)])
def test_rounding_of_many_steps_is_allowed_where_numbers_are_not_new(by, is_found, kind):
    # Half the digits of fp32 are 3.5e-4, also of complex numbers of two.
    def drift(rank: int, shards: dict[str, Tensor]) -> None:
        if kind is torch.complex64:
            shards[OUT] = torch.complex(shards[OUT], shards[OUT])
        if rank >= 3:
            shards[OUT] *= 1 + by

    assert (found_by(drift, is_exact=False) is not None) == is_found
    assert found_by(drift, is_exact=True) is not None


def test_numbers_that_are_not_finite_are_equal_and_other_shapes_are_not() -> None:
    def overflow(rank: int, shards: dict[str, Tensor]) -> None:
        for value, x in zip((float("nan"), float("inf")), shards.values(), strict=False):
            x.fill_(value)

    assert found_by(overflow) is None

    def other(rank: int, shards: dict[str, Tensor]) -> None:
        if rank == 0:
            shards["model.angles"] = torch.zeros(8)

    with pytest.raises(DivergenceError, match=r"model.angles: \[8\]"):
        found_by(other)
