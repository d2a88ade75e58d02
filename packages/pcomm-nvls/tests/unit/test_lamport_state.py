"""What the barrier-free operations are told of their memory, and the emulated wait for data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nvls_support.protocols.program import Cell, Operation, Place, Poll, Read, Step, Value, Write
from nvls_support.protocols.search import check_sequences
from nvls_support.protocols.shipped import LAMPORT, SLOTS, WorkspaceProtocol
from pcomm.nvls.primitives import emulation as emulated_wait
from pcomm.nvls.primitives.lamport_numbers import (
    LAMPORT_SLOTS,
    NOTHING_HERE,
    OPERATION_NUMBERS,
    is_spread,
    sent_bytes,
)
from pcomm.nvls.workspace.memory import LamportState, lamport_region_bytes

DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def is_zero(dtype: torch.dtype) -> bool:
    """Whether the word for nothing is zeros of this type, wherever it stands in an element."""
    word = NOTHING_HERE - (1 << 32)
    words = torch.tensor([[word, 0, 0, 0], [0, word, 0, 0]], dtype=torch.int32)
    return not words.view(dtype).to(torch.complex128).abs().any()


def test_types_that_are_sent_as_they_are_lose_no_more_than_the_sign_of_a_zero() -> None:
    sent = {dtype for dtype in DTYPES if not is_spread(dtype)}
    assert len(sent) == 5
    assert all(is_zero(dtype) for dtype in sent)
    others = {torch.int8, torch.int64, torch.uint8, torch.float64, torch.float8_e4m3fnuz}
    assert not others & sent
    assert not any(is_zero(dtype) for dtype in others)
    assert sent_bytes(48, torch.bfloat16) == 48
    assert sent_bytes(48, torch.float64) == 96


def test_slots_follow_each_other_and_only_they_are_cleared() -> None:
    # A length that is no multiple of 16 bytes is cut.
    state = LamportState(64, 3, 47, device=torch.device("cpu"))
    assert state.arguments() == {"state": state.words, "region": 64, "slot_bytes": 96}
    assert lamport_region_bytes(3, 47) == 3 * 96
    assert state.words.tolist() == [0, 0, 0]
    buffer = torch.full((64 + 3 * 96 + 32,), 7, dtype=torch.uint8)
    state.clear(buffer)
    assert buffer[:64].eq(7).all()
    assert buffer[-32:].eq(7).all()
    assert buffer[64:-32].view(torch.int32).eq(-(1 << 31)).all()


def test_numbers_begin_again_at_the_first_slot() -> None:
    assert OPERATION_NUMBERS % LAMPORT_SLOTS == 0
    assert OPERATION_NUMBERS + LAMPORT_SLOTS < 1 << 31


GATHER = Operation("all_gather", (1, 1, 1), 1)


class ReduceScatters(WorkspaceProtocol):
    """Operations without barriers as reduce-scatters of what lies in a slot.

    A segment goes to one rank only, so that a rank may end the operation before another one has
    read all of its input. `of_view` takes what an all-gather before it left in its slot.
    """

    of_view = False

    def _lamport(self, operations: Sequence[Operation], place: Place) -> Iterator[Step]:
        number, me, ranks = place.number, place.rank, range(operations[place.number].size)
        slot, own = self.lamport_slot(operations, number), Value(number, me)
        before = operations[number - 1] if number else None
        if self.of_view and before == GATHER:
            old = (number - 1) % self.slots
            held = {Cell(me, SLOTS, old, r): Value(number - 1, r) for r in ranks}
        else:
            held = {Cell(me, SLOTS, number % self.slots, r): own for r in ranks}
            yield Write(dict(held), "computes")
        for (cell, value), owner in zip(held.items(), ranks, strict=True):
            yield Read({cell: value})
            yield Write({Cell(owner, LAMPORT, slot, me): own}, "puts")
        yield Write(dict.fromkeys(self.dirty(operations, number, me)), "clears")
        yield Poll({Cell(me, LAMPORT, slot, peer): Value(number, peer) for peer in ranks})


class OfViews(ReduceScatters):
    of_view = True


def test_a_reduce_scatter_reads_the_slot_of_its_own_turn_alone() -> None:
    # Where shapes are equal, a rank gathers into the segment that it got of the input.
    other_shape = Operation("all_gather", (2, 1, 1), 1)
    letters = [GATHER, other_shape, Operation("lamport_all_gather", (1, 1, 1), 1)]
    right = check_sequences(ReduceScatters(2, LAMPORT_SLOTS), letters, 3)
    assert right.violation is None, str(right.violation)
    wrong = str(check_sequences(OfViews(2, LAMPORT_SLOTS), letters, 3).violation)
    assert wrong.startswith("overwritten before it was read")
    assert "2: all_gather" in wrong


class Memory:
    """Four vectors of 16 bytes, and the failure word; words arrive whenever a wait sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arriving: list[int]) -> None:
        self.words = np.full(16, NOTHING_HERE, dtype=np.uint32)
        self.failure, self.arriving, self.sleeps = np.zeros(1, dtype=np.int32), arriving, 0
        monkeypatch.setattr(emulated_wait.time, "sleep", self.sleep)
        monkeypatch.setattr(emulated_wait.time, "monotonic_ns", lambda: self.sleeps)

    def sleep(self, _: float) -> None:
        self.sleeps += 1
        if self.arriving:
            self.words[self.arriving.pop(0)] = 0

    def wait(self, mask: list[int], limit_ns: int) -> int:
        """Wait for vectors of ranks 5, 6, 7 and 8; the failure word."""
        addresses: Any = self.words.ctypes.data + 16 * np.arange(4)
        emulated_wait.wait_for_payload(
            addresses,
            np.array(mask, dtype=bool),
            limit_ns,
            self.failure.ctypes.data,
            np.arange(5, 9),
        )
        return int(self.failure[0])


def test_the_wait_is_for_every_word_under_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    arriving = [3, 0, 1, 2, 14, 13, 12, 15]
    memory = Memory(monkeypatch, arriving)
    assert memory.wait([1, 0, 0, 1], 100) == 0
    assert memory.sleeps == 8
    assert memory.wait([0, 0, 0, 0], 100) == 0
    assert memory.sleeps == 8


def test_the_limit_names_the_rank_of_the_first_vector_that_is_missing(monkeypatch):
    memory = Memory(monkeypatch, [0, 1, 2, 3, 8, 9, 10])
    assert memory.wait([1, 0, 1, 0], 20) == 7 + 1
    assert memory.sleeps == 21
    # With a failure nothing is waited for.
    assert memory.wait([0, 1, 0, 0], 20) == 7 + 1
    assert memory.sleeps == 21
