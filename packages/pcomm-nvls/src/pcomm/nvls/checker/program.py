"""A sequence of operations as a graph of steps: what must come before each, and what it touches.

Sets of steps are integers with one bit a step, so that a state of the search is a number and a
list of what the elements hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pcomm.core.errors import ConfigError
from pcomm.nvls.checker.operation import Operation, Place, Protocol
from pcomm.nvls.checker.steps import Arrive, Cell, Poll, Read, Step, Value, Wait, Write


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
        ConfigError: For an empty sequence, or operations on different numbers of ranks.
    """
    if len({operation.size for operation in operations}) != 1:
        raise ConfigError(
            "check: a sequence of operations",
            found=f"numbers of ranks: {[operation.size for operation in operations]}",
            why="All operations of a sequence run on the same ranks, and there is at least one.",
            fix="Give all operations as many counts as there are ranks.",
        )
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
