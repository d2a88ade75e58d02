"""Protocols on symmetric memory: steps of a CTA, operations, and a sequence as a graph of steps.

The memory order is that of a GPU at system scope. A load or store completes at any time between
the step that orders it and the next `Arrive` of its CTA that releases, or the end of the kernel. A
store waits for the loads before it, whose results it may carry; a load waits for the polls before
it, and for stores of its own CTA to the same elements.

Sets of steps are integers with one bit a step, so that a state of the search is a number and a
list of what the elements hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from typing import Protocol as StructuralType


class Cell(NamedTuple):
    """One element of symmetric memory: the smallest that is written and read at once.

    Attributes:
        rank: Rank whose memory it is.
        memory: Name of a part of the workspace, such as "barrier"; parts do not overlap.
        slot: Number of the slot in that part.
        element: Number of the element in the slot. Negative numbers are flags.
    """

    rank: int
    memory: str
    slot: int
    element: int

    def __str__(self) -> str:
        name = f"flag {-self.element - 1}" if self.element < 0 else f"element {self.element}"
        return f"{name} of {self.memory} slot {self.slot} on rank {self.rank}"


class Value(NamedTuple):
    """What an element holds: data, told apart by its origin alone.

    Attributes:
        operation: Number of the operation that wrote it, counted from 0.
        rank: Rank that wrote it.
        reduced: True for the result of a reduction, false for an input.
    """

    operation: int
    rank: int
    reduced: bool = False

    def __str__(self) -> str:
        kind = "result" if self.reduced else "data"
        return f"the {kind} that rank {self.rank} wrote in operation {self.operation}"


@dataclass(frozen=True)
class Write:
    """Store values to elements, on the own rank, on another one, or by multicast on all.

    Stores to elements that a `Poll` reads arrive at each rank by themselves. Those to other
    elements count as one step: whether two ranks see them at different moments changes no verdict,
    since only what comes after the next release may depend on them.

    Args:
        values: The value of each element; None is the sentinel that a poll waits to see replaced.
        verb: Word for the trace, such as "puts" or "clears".
    """

    values: Mapping[Cell, Value | None]
    verb: str = "writes"


@dataclass(frozen=True)
class Read:
    """Load elements, on the own rank or on others; a violation where one holds another value.

    Args:
        values: The value that each element must hold.
        verb: Word for the trace, such as "reads" or "pulls".
    """

    values: Mapping[Cell, Value]
    verb: str = "reads"


@dataclass(frozen=True)
class Poll:
    """Load elements until none of them holds the sentinel, and then as `Read`.

    Args:
        values: The value that each element must hold in the end.
        verb: Word for the trace.
    """

    values: Mapping[Cell, Value]
    verb: str = "polls"


@dataclass(frozen=True)
class Arrive:
    """Add one to the counter of a block on every rank.

    Args:
        block: Number of the block, usually that of the CTA.
        release: True if the loads and stores before it complete first.
    """

    block: int
    release: bool = True


@dataclass(frozen=True)
class Wait:
    """Wait until the counter of a block on the own rank has one arrival of each rank and epoch.

    The epoch is the number of waits for that block on the own rank so far, this one included. It
    is kept by the rank itself, so a rank that leaves out a barrier is an epoch behind.

    Args:
        block: Number of the block.
    """

    block: int


Step: TypeAlias = Write | Read | Poll | Arrive | Wait


@dataclass(frozen=True)
class Operation:
    """One operation that every rank launches, as one kernel on the rank's only stream.

    Args:
        kind: Name of the operation; the protocol knows its meaning.
        counts: Number of elements of each rank's segment; its length is the number of ranks.
        ctas: Number of CTAs, the same on all ranks, or one number for each rank.
        slot: Slot that was fixed beforehand, as for an operation in a captured graph, or None if
            the protocol's rotation chooses it.
        seam: True if the host does not know which slot the operation before it used: the first
            one of a captured graph, and the first one outside after a graph was replayed.
        root: Rank that receives, for operations with one receiver.
    """

    kind: str
    counts: tuple[int, ...]
    ctas: int | tuple[int, ...] = 1
    slot: int | None = None
    seam: bool = False
    root: int = 0

    def __post_init__(self) -> None:
        ctas = self.ctas if isinstance(self.ctas, tuple) else (self.ctas,) * self.size
        wrong = not self.counts or len(ctas) != self.size or min(*ctas, *self.counts) < 0
        if wrong or not 0 <= self.root < self.size:
            raise ValueError(f"{self}: not one count, and CTAs, of 0 or more for each rank")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    def ctas_of(self, rank: int) -> int:
        """Number of CTAs that a rank launches."""
        return self.ctas[rank] if isinstance(self.ctas, tuple) else self.ctas

    def segment(self, rank: int) -> range:
        """Elements of a rank's segment, when the segments of all ranks lie one after another."""
        start = sum(self.counts[:rank])
        return range(start, start + self.counts[rank])

    def __str__(self) -> str:
        text = f"{self.kind}{list(self.counts)}"
        if self.ctas != 1:
            text += f" x{self.ctas} CTAs"
        if self.slot is not None:
            text += f" in slot {self.slot}"
        return text + (" after a seam" if self.seam else "")


class Place(NamedTuple):
    """A CTA of an operation on a rank.

    Attributes:
        number: Number of the operation in the sequence, from 0.
        rank: Rank.
        cta: Number of the CTA on the rank.
    """

    number: int
    rank: int
    cta: int


class Protocol(StructuralType):
    """The steps of each CTA; a generator function will do."""

    def __call__(self, operations: Sequence[Operation], place: Place, /) -> Iterable[Step]:
        """Return the steps of one CTA in program order.

        Args:
            operations: The whole sequence. A protocol of a real workspace depends on the
                operations up to `place.number` alone.
            place: Operation, rank and CTA in question.
        """
        ...


class Event(NamedTuple):
    """A step at its place; None for the end of a kernel, when all CTAs of a rank have ended."""

    place: Place
    step: Step | None


@dataclass
class Program:
    """All steps of all ranks, numbered from 0.

    Attributes:
        operations: Operations of the sequence.
        events: Step of each number.
        before: Set of the steps that each step waits for by program order.
        after: Numbers of the steps that have a step in `before`.
        reads: Elements that a step loads, with the value that each must hold.
        writes: Elements that a step stores to, with the value.
        conflicts: Set of the steps that touch an element of the step, where one of both stores.
        readers: Set of the steps that must find a value in an element.
        arrivals: Set of the steps that arrive at a block.
        thresholds: Number of arrivals that each `Wait` waits for.
        filled: Elements that a step stores data to, and not the sentinel.
        polled: Elements that each `Poll` waits for.
    """

    operations: tuple[Operation, ...]
    events: list[Event] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    reads: list[tuple[tuple[Cell, Value], ...]] = field(default_factory=list)
    writes: list[tuple[tuple[Cell, Value | None], ...]] = field(default_factory=list)
    conflicts: list[int] = field(default_factory=list)
    readers: dict[tuple[Cell, Value], int] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)
    thresholds: dict[int, int] = field(default_factory=dict)
    filled: list[tuple[Cell, ...]] = field(default_factory=list)
    polled: dict[int, tuple[Cell, ...]] = field(default_factory=dict)

    def add(self, event: Event, before: int) -> int:
        """Append a step, and return it as a set."""
        self.events.append(event)
        self.before.append(before)
        self.after.append([])
        step = event.step
        self.reads.append(tuple(step.values.items()) if isinstance(step, Read | Poll) else ())
        self.writes.append(tuple(step.values.items()) if isinstance(step, Write) else ())
        self.filled.append(tuple(c for c, value in self.writes[-1] if value is not None))
        number = len(self.events) - 1
        if isinstance(step, Poll):
            self.polled[number] = tuple(step.values)
        while before:
            bit = before & -before
            self.after[bit.bit_length() - 1].append(number)
            before ^= bit
        return 1 << number

    def finish(self) -> None:
        """Find what conflicts, once all steps are there."""
        loads: dict[Cell, int] = defaultdict(int)
        stores: dict[Cell, int] = defaultdict(int)
        for number in range(len(self.events)):
            for cell, value in self.reads[number]:
                loads[cell] |= 1 << number
                self.readers[cell, value] = self.readers.get((cell, value), 0) | 1 << number
            for cell, _ in self.writes[number]:
                stores[cell] |= 1 << number
        for number in range(len(self.events)):
            others = 0
            for cell, _ in self.reads[number]:
                others |= stores[cell]
            for cell, _ in self.writes[number]:
                others |= stores[cell] | loads[cell]
            self.conflicts.append(others & ~(1 << number))


def build(protocol: Protocol, operations: Sequence[Operation]) -> Program:
    """Return the graph of a sequence.

    Raises:
        ValueError: For an empty sequence, or operations on different numbers of ranks.
    """
    if len({operation.size for operation in operations}) != 1:
        raise ValueError("operations on different numbers of ranks, or none")
    places = [
        Place(number, rank, cta)
        for rank in range(operations[0].size)
        for number, operation in enumerate(operations)
        for cta in range(operation.ctas_of(rank))
    ]
    steps = {place: [s for s in protocol(operations, place) if _acts(s)] for place in places}
    polled = {
        cell for own in steps.values() for s in own if isinstance(s, Poll) for cell in s.values
    }
    program = Program(tuple(operations))
    for rank in range(operations[0].size):
        epochs: dict[int, int] = defaultdict(int)
        start = 0
        for number, operation in enumerate(operations):
            end = start
            for cta in range(operation.ctas_of(rank)):
                place = Place(number, rank, cta)
                end |= _add_cta(program, place, steps[place], start, polled, epochs)
            start = program.add(Event(Place(number, rank, -1), None), end)
    program.finish()
    return program


def _acts(step: Step) -> bool:
    return isinstance(step, Arrive | Wait) or bool(step.values)


def _add_cta(
    program: Program,
    place: Place,
    steps: Sequence[Step],
    start: int,
    polled: set[Cell],
    epochs: dict[int, int],
) -> int:
    """Add the steps of one CTA after `start`, and return those that its end waits for."""
    ordered, loads, polls = start, 0, 0
    stores: dict[Cell, int] = {}
    pending = 0
    size = program.operations[0].size
    for step in steps:
        event = Event(place, step)
        if isinstance(step, Arrive):
            if step.release:
                ordered |= pending
                loads = polls = pending = 0
                stores.clear()
            bit = program.add(event, ordered)
            program.arrivals[step.block] = program.arrivals.get(step.block, 0) | bit
            ordered = bit
        elif isinstance(step, Wait):
            ordered = program.add(event, ordered)
            epochs[step.block] += 1
            program.thresholds[ordered.bit_length() - 1] = size * epochs[step.block]
        else:
            own = 0
            for cell in step.values:
                own |= stores.get(cell, 0)
            if isinstance(step, Write):
                for part in _arriving_alone(step, polled):
                    bit = program.add(Event(place, part), ordered | loads | own)
                    stores |= dict.fromkeys(part.values, bit)
                    pending |= bit
            else:
                # Polls do not wait for each other: a kernel loads from all ranks at once.
                after = own if isinstance(step, Poll) else own | polls
                bit = program.add(event, ordered | after)
                loads |= bit
                pending |= bit
                if isinstance(step, Poll):
                    polls |= bit
    return ordered | pending


def _arriving_alone(step: Write, polled: set[Cell]) -> list[Write]:
    """A store as one step, or as one for each rank where polls may see it arrive."""
    if polled.isdisjoint(step.values):
        return [step]
    parts: dict[int, dict[Cell, Value | None]] = defaultdict(dict)
    for cell, value in step.values.items():
        parts[cell.rank][cell] = value
    return [Write(values, step.verb) for values in parts.values()]
