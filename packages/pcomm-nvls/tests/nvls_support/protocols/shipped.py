"""The protocols of a workspace: what each CTA of each operation does to symmetric memory.

There are two families, in memory of their own. Operations with a barrier rotate through slots and
meet the other ranks once each; two-shot all-reduce meets them twice. Operations of the Lamport
family have no barrier: data are written over a sentinel, and the receiver polls until it is gone.
They take turns with the others all the same: to the slots, waiting for the data of all ranks is a
barrier.

CTA `b` of a rank touches the same elements of every segment, before and after the barrier, so that
it has to meet CTA `b` of the other ranks alone. The parts of the CTAs of an operation are those of
its own number of CTAs; the next operation may have another number.

Fused and coalesced operations take the steps of one of these: reduce-scatter, norm and all-gather
in one kernel are those of a two-shot all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvls_support.protocols.program import (
    Arrive,
    Cell,
    Operation,
    Place,
    Poll,
    Read,
    Step,
    Value,
    Wait,
    Write,
)

SLOTS = "barrier"
LAMPORT = "lamport"

BARRIER_KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce_one_shot",
    "all_reduce_two_shot",
    "gather",
)
# No kernel has the last one: it is there for the flags that it would need.
LAMPORT_KINDS = (
    "lamport_all_gather",
    "lamport_reduce_scatter",
    "lamport_all_reduce",
    "lamport_gather",
)


@dataclass(frozen=True)
class WorkspaceProtocol:
    """What pcomm-nvls does, as `check` takes it; other numbers give the known mistakes.

    Methods say what a sequence makes of these numbers; a subclass may replace one of them to check
    another protocol.

    Args:
        slots: Number of slots that operations with a barrier rotate through.
        lamport_slots: Number of slots of the Lamport family.
        entry_barriers: True if an operation begins with a barrier where it may have the slot of
            the operation before it.
        clear_ahead: Distance in operations of the Lamport slot that an operation clears: the slot
            that the operation so many places later uses.
    """

    slots: int
    lamport_slots: int
    entry_barriers: bool = True
    clear_ahead: int = 2

    def __call__(self, operations: Sequence[Operation], place: Place) -> Iterator[Step]:
        """Return the steps of one CTA.

        Raises:
            ValueError: For an unknown kind of operation.
        """
        operation = operations[place.number]
        if operation.kind in LAMPORT_KINDS:
            return self._lamport(operations, place)
        if operation.kind in BARRIER_KINDS:
            return self._barrier(operations, place)
        raise ValueError(f"no steps for operation {operation.kind!r}")

    def slot(self, operations: Sequence[Operation], number: int) -> int:
        """Slot of an operation; one of the Lamport family takes its turn, too, and leaves it."""
        fixed = operations[number].slot
        return number % self.slots if fixed is None else fixed

    def enters(self, operations: Sequence[Operation], number: int) -> bool:
        """True if an operation begins with a barrier."""
        repeats = number > 0 and (
            self.slot(operations, number - 1) == self.slot(operations, number)
        )
        return self.entry_barriers and (operations[number].seam or repeats)

    def lamport_slot(self, operations: Sequence[Operation], number: int) -> int:
        """Slot of a Lamport operation: its epoch, which is counted on the device."""
        return len(_earlier(LAMPORT_KINDS, operations, number)) % self.lamport_slots

    def sends_flags(self, operation: Operation) -> bool:
        """True if every rank tells every other one that it has come, beside its data.

        Without flags a rank may run ahead of those whose data it does not wait for. Equal counts
        that are not 0 need none in an all-gather or all-reduce: the data of each rank go to all.
        """
        return operation.kind == "lamport_gather" or 0 in operation.counts

    def dirty(self, operations: Sequence[Operation], number: int, rank: int) -> list[Cell]:
        """What an operation clears on a rank: all that was written to that slot before."""
        slot = (self.lamport_slot(operations, number) + self.clear_ahead) % self.lamport_slots
        users = [
            n
            for n in _earlier(LAMPORT_KINDS, operations, number)
            if self.lamport_slot(operations, n) == slot
        ]
        return self.received(operations, users[-1], rank, slot) if users else []

    def received(
        self, operations: Sequence[Operation], number: int, rank: int, slot: int
    ) -> list[Cell]:
        """Elements that a Lamport operation receives on a rank, flags included."""
        operation = operations[number]
        places = [
            Place(number, source, cta)
            for source in range(operation.size)
            for cta in range(operation.ctas_of(source))
        ]
        indices = [i for p in places for i in _pushed(operation, p, rank)]
        if self.sends_flags(operation):
            indices += [_flag(source) for source in range(operation.size)]
        return [Cell(rank, LAMPORT, slot, index) for index in indices]

    def _barrier(self, operations: Sequence[Operation], place: Place) -> Iterator[Step]:
        operation, slot = operations[place.number], self.slot(operations, place.number)
        ranks, me = range(operation.size), place.rank
        barrier = (Arrive(place.cta), Wait(place.cta))
        if self.enters(operations, place.number):
            yield from barrier
        mine = {r: _part(operation.segment(r), operation, place) for r in ranks}
        everything = [index for part in mine.values() for index in part]

        def cells(on: Sequence[int], indices: Sequence[int]) -> list[Cell]:
            return [Cell(rank, SLOTS, slot, index) for rank in on for index in indices]

        if operation.kind in ("all_gather", "gather"):
            receivers = ranks if operation.kind == "all_gather" else (operation.root,)
            own = Value(place.number, me)
            yield Write(dict.fromkeys(cells(receivers, mine[me]), own), "puts")
            yield from barrier
            if me in receivers:
                yield Read(
                    {c: Value(place.number, r) for r in ranks for c in cells((me,), mine[r])}
                )
            return
        yield Write(dict.fromkeys(cells((me,), everything), Value(place.number, me)), "copies")
        yield from barrier
        pulled = everything if operation.kind == "all_reduce_one_shot" else mine[me]
        yield Read({c: Value(place.number, r) for r in ranks for c in cells((r,), pulled)}, "pulls")
        if operation.kind == "all_reduce_two_shot":
            result = Value(place.number, me, reduced=True)
            yield Write(dict.fromkeys(cells(ranks, mine[me]), result), "puts")
            yield from barrier
            yield Read(
                {c: Value(place.number, r, True) for r in ranks for c in cells((me,), mine[r])}
            )

    def _lamport(self, operations: Sequence[Operation], place: Place) -> Iterator[Step]:
        operation, slot = operations[place.number], self.lamport_slot(operations, place.number)
        ranks, me = range(operation.size), place.rank

        def values(on: Sequence[int], source: int, indices: Sequence[int]) -> dict[Cell, Value]:
            value = Value(place.number, source)
            return {Cell(rank, LAMPORT, slot, index): value for rank in on for index in indices}

        flags = self.sends_flags(operation) and place.cta == 0
        if flags:
            yield Write(values(ranks, me, [_flag(me)]), "puts")
        sent = [values((rank,), me, _pushed(operation, place, rank)) for rank in ranks]
        yield Write({cell: value for to_one in sent for cell, value in to_one.items()}, "puts")
        dirty = self.dirty(operations, place.number, me)
        yield Write(dict.fromkeys(dirty[place.cta :: operation.ctas_of(me)]), "clears")
        for source in ranks:
            if flags:
                yield Poll(values((me,), source, [_flag(source)]))
            if _receives(operation, me):
                pushed = _pushed(operation, place._replace(rank=source), me)
                yield Poll(values((me,), source, pushed))


def _earlier(kinds: Sequence[str], operations: Sequence[Operation], number: int) -> list[int]:
    """Numbers of the operations of some kinds before one."""
    return [n for n in range(number) if operations[n].kind in kinds]


def _part(indices: range, operation: Operation, place: Place) -> range:
    """The elements of a segment that a CTA touches, on whatever rank they are."""
    return indices[place.cta :: operation.ctas_of(place.rank)]


def _pushed(operation: Operation, place: Place, receiver: int) -> list[int]:
    """Where a CTA's data lie in the Lamport slot of a rank; nowhere if that gets none."""
    if not _receives(operation, receiver):
        return []
    if operation.kind in ("lamport_all_gather", "lamport_gather"):
        return list(_part(operation.segment(place.rank), operation, place))
    is_whole = operation.kind == "lamport_all_reduce"
    length = sum(operation.counts) if is_whole else operation.counts[receiver]
    return list(_part(range(place.rank * length, (place.rank + 1) * length), operation, place))


def _receives(operation: Operation, rank: int) -> bool:
    return operation.kind != "lamport_gather" or rank == operation.root


def _flag(source: int) -> int:
    return -1 - source
