"""The turns of operations, and which of them wait for all ranks before they write."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvls_support.refusals import refused
from pcomm.core.errors import ConfigError
from pcomm.nvls.policy.table import MAX_BLOCKS
from pcomm.nvls.workspace.memory import Regions
from pcomm.nvls.workspace.slots import SlotRing


def test_two_slots_take_turns_and_nothing_waits_before_it_writes() -> None:
    rotation = SlotRing()
    turns = [rotation.next(is_captured=False) for _ in range(5)]
    assert [turn.slot for turn in turns] == [0, 1, 0, 1, 0]
    assert [turn.generation for turn in turns] == [0, 1, 2, 3, 4]
    assert not any(turn.needs_entry for turn in turns)


def test_one_slot_waits_from_the_second_operation_on() -> None:
    rotation = SlotRing(1)
    turns = [rotation.next(is_captured=False) for _ in range(3)]
    assert [turn.slot for turn in turns] == [0, 0, 0]
    assert [turn.needs_entry for turn in turns] == [False, True, True]


def test_what_is_captured_and_what_may_follow_a_replay_waits() -> None:
    rotation = SlotRing()
    waits = [rotation.next(is_captured=c).needs_entry for c in (False, True, True, False, False)]
    assert waits == [False, True, True, True, True]


def test_in_a_sequence_only_the_first_operation_waits() -> None:
    rotation = SlotRing()
    with rotation.sequence():
        assert [rotation.next(is_captured=True).needs_entry for _ in range(3)] == [
            True,
            False,
            False,
        ]
    with rotation.sequence():
        assert [rotation.next(is_captured=False).needs_entry for _ in range(2)] == [True, False]
    assert rotation.next(is_captured=False).needs_entry


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_slot_is_never_repeated_without_waiting(graphs: list[list[bool]]) -> None:
    """Whatever order graphs and eager operations are replayed in afterwards."""
    rotation = SlotRing()
    sequences = []
    for graph in graphs:
        with rotation.sequence():
            sequences.append([rotation.next(is_captured=True) for _ in graph])
    eager = [rotation.next(is_captured=False) for _ in range(2)]
    for first in (*sequences, [eager[0]], [eager[1]]):
        for second in (*sequences, [eager[0]], [eager[1]]):
            run = [*first, *second]
            for before, after in itertools.pairwise(run):
                assert after.needs_entry or after.slot != before.slot


def test_what_cannot_be_is_refused() -> None:
    refused(ConfigError, "slots=0", SlotRing, 0)
    rotation = SlotRing()
    with rotation.sequence(), pytest.raises(ConfigError, match="within a sequence"):  # noqa: SIM117
        with rotation.sequence():
            pass
    # The outer one has ended all the same.
    with rotation.sequence():
        assert not rotation.next(is_captured=False).needs_entry


@given(st.integers(1, 72), st.integers(1, 1 << 24), st.integers(1, 3), st.integers(0, 1 << 20))
def test_regions_follow_each_other(world: int, slot: int, slots: int, low: int) -> None:
    regions = Regions(world, slot, slots, low)
    starts = [0, *(regions.slot(place) for place in range(slots)), regions.lamport_region]
    lengths = [MAX_BLOCKS * world * 4, *([slot] * slots), low]
    ends = [*starts[1:], regions.num_bytes]
    for start, length, end in zip(starts, lengths, ends, strict=True):
        assert start % 4096 == 0
        assert start + length <= end < start + length + 4096
