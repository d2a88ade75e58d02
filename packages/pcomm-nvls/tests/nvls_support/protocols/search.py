"""A model checker: runs sequences of operations in every order that a protocol allows.

A step that touches nothing which any other step could touch before it may be taken at once: every
order in which it comes later is the same as one in which it comes now (Godefroid's persistent
sets, of one step each). `_alone` finds such steps: it lets all others run as far as they can while
this one stands still. Where there is no such step, the search tries all of them. So a protocol
without races is explored in one order, and the branches are its races.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from nvls_support.protocols.program import (
    Arrive,
    Cell,
    Operation,
    Program,
    Protocol,
    Value,
    Wait,
    build,
)


@dataclass(frozen=True)
class Report:
    """What was explored, and the first counterexample.

    Args:
        num_sequences: Number of sequences that were explored.
        num_states: Number of states that were visited in all of them.
        violation: Counterexample, or None if there is none within these bounds.
    """

    num_sequences: int
    num_states: int
    violation: Violation | None


def check(
    protocol: Protocol, operations: Sequence[Operation], *, max_states: int = 1_000_000
) -> Violation | None:
    """Explore a sequence of operations in every order that the protocol allows.

    Args:
        protocol: Steps of each CTA.
        operations: Sequence of operations, which all ranks launch in this order.
        max_states: Largest number of states to visit.

    Returns:
        A counterexample, or None if there is none: each element that is read holds the value that
        the protocol expects, none is overwritten before its last reader read it, and all ranks
        come to the end.

    Raises:
        ValueError: For an empty sequence, operations on different numbers of ranks, or more states
            than `max_states`.
    """
    return _checked(protocol, operations, max_states)[1]


def check_sequences(
    protocol: Protocol, alphabet: Sequence[Operation], length: int, *, max_states: int = 1_000_000
) -> Report:
    """Explore all sequences of operations up to a length, the shortest first.

    Args:
        protocol: Steps of each CTA.
        alphabet: Operations that a sequence may have at any place, any number of times.
        length: Number of operations of the longest sequences.
        max_states: Largest number of states of one sequence.

    Returns:
        The report, which ends with the first counterexample.

    Raises:
        ValueError: As `check`.
    """
    num_sequences = num_states = 0
    for size in range(1, length + 1):
        for operations in product(alphabet, repeat=size):
            states, violation = _checked(protocol, operations, max_states)
            num_sequences += 1
            num_states += states
            if violation is not None:
                return Report(num_sequences, num_states, violation)
    return Report(num_sequences, num_states, None)


def _checked(
    protocol: Protocol, operations: Sequence[Operation], max_states: int
) -> tuple[int, Violation | None]:
    program = build(protocol, operations)
    states, found = search(program, max_states)
    return states, None if found is None else describe(program, *found)


# The steps of a path, the last one first.
_Path = tuple[int, "_Path"] | None


def search(program: Program, max_states: int) -> tuple[int, tuple[list[int], Problem] | None]:
    """Explore a sequence.

    Args:
        program: Graph of its steps.
        max_states: Largest number of states to visit.

    Returns:
        The number of states that were visited, and a counterexample or None: the steps up to the
        problem, or the steps that wait where it is a deadlock.

    Raises:
        ValueError: Where there are more states.
    """
    visited = 0
    seen: set[tuple[int, frozenset[tuple[Cell, object]]]] = set()
    pending: list[tuple[State, _Path]] = [(start(program), None)]
    while pending:
        state, path = pending.pop()
        while True:
            visited += 1
            if visited > max_states:
                raise ValueError(f"more than {max_states} states: races, or a long sequence")
            numbers = _next(program, state)
            if not numbers:
                break
            after = []
            for number in numbers:
                found = run(program, number, state)
                if isinstance(found, Problem):
                    return visited, ([*_steps(path), number], found)
                after.append((found, (number, path)))
            if len(after) > 1:
                for one in after:
                    key = (one[0].done, frozenset(one[0].memory.items()))
                    if key not in seen:
                        seen.add(key)
                        pending.append(one)
                break
            [(state, path)] = after
        if not numbers and state.ready:
            return visited, (bits(state.ready), Problem(DEADLOCK, done=state.done))
    return visited, None


def _next(program: Program, state: State) -> list[int]:
    """The steps to explore in a state: one that is alone, or else all that pass."""
    data = []
    for number in bits(state.ready):
        if passes(program, number, state.done, state.memory.get):
            # Arrivals are never undone, so barriers and ends of kernels do not depend on the order.
            if not program.reads[number] and not program.writes[number]:
                return [number]
            data.append(number)
    for number in data:
        if _alone(program, number, state):
            return [number]
    return data


def _alone(program: Program, number: int, state: State) -> bool:
    """True if no step that conflicts with this one can be taken before it.

    What the others can do is overestimated: an element that was written once counts as written.
    """
    conflicts = program.conflicts[number] & ~state.done
    if not conflicts:
        return True
    done = state.done
    written = set(state.memory)
    ready, waiting = bits(state.ready ^ (1 << number)), 0
    while ready:
        other = ready.pop()
        if passes(program, other, done, written.__contains__):
            if conflicts >> other & 1:
                return False
            done |= 1 << other
            written.update(program.filled[other])
            ready += [n for n in program.after[other] if not program.before[n] & ~done]
        else:
            waiting |= 1 << other
        if waiting and not ready:
            ready = [n for n in bits(waiting) if passes(program, n, done, written.__contains__)]
            waiting &= ~sum(1 << n for n in ready)
    return True


def _steps(path: _Path) -> list[int]:
    steps: list[int] = []
    while path is not None:
        step, path = path
        steps.append(step)
    return steps[::-1]


class State(NamedTuple):
    """A state of the search.

    Args:
        done: Set of the steps that are done.
        ready: Set of the steps that are not, and that nothing before them keeps back any more.
        memory: The value of each element that was written and not cleared since.
    """

    done: int
    ready: int
    memory: dict[Cell, Value]


def start(program: Program) -> State:
    """The state before the first step; all elements hold the sentinel."""
    return State(0, sum(1 << n for n, before in enumerate(program.before) if not before), {})


def passes(program: Program, number: int, done: int, holds: Callable[[Cell], object]) -> bool:
    """True if a ready step need not wait for other ranks, given what the elements hold."""
    if number in program.polled:
        return all(map(holds, program.polled[number]))
    step = program.events[number].step
    if isinstance(step, Wait):
        arrived = (done & program.arrivals.get(step.block, 0)).bit_count()
        return arrived >= program.thresholds[number]
    return True


def run(program: Program, number: int, state: State) -> State | Problem:
    """The state after a step that passes, or what is wrong with taking it."""
    done, memory = state.done, state.memory
    for cell, expected in program.reads[number]:
        if memory.get(cell) != expected:
            return Problem(STALE, number, cell, memory.get(cell), expected)
    if program.writes[number]:
        memory = memory.copy()
    for cell, value in program.writes[number]:
        old = memory.get(cell)
        if old is not None:
            waiting = program.readers.get((cell, old), 0) & ~done
            if waiting:
                first = (waiting & -waiting).bit_length() - 1
                return Problem(OVERWRITTEN, number, cell, old, value, first)
        if value is None:
            memory.pop(cell, None)
        else:
            memory[cell] = value
    done |= 1 << number
    ready = state.ready ^ (1 << number)
    for follower in program.after[number]:
        if not program.before[follower] & ~done:
            ready |= 1 << follower
    return State(done, ready, memory)


def bits(numbers: int) -> list[int]:
    """The members of a set of steps, ascending."""
    found = []
    while numbers:
        bit = numbers & -numbers
        found.append(bit.bit_length() - 1)
        numbers ^= bit
    return found


STALE = "read before write"
OVERWRITTEN = "overwritten before it was read"
DEADLOCK = "deadlock"


class Problem(NamedTuple):
    """A step that must not be possible.

    Args:
        kind: `STALE`, `OVERWRITTEN` or `DEADLOCK`.
        number: Number of the step.
        cell: Element in question.
        held: Value in it at that moment, or None for the sentinel.
        wanted: Value that the step expects in it, or stores to it.
        reader: Number of the step that had yet to read what it held.
        done: Set of the steps that were done before a deadlock.
    """

    kind: str
    number: int = -1
    cell: Cell | None = None
    held: Value | None = None
    wanted: Value | None = None
    reader: int = -1
    done: int = 0


@dataclass(frozen=True)
class Violation:
    """A counterexample: an order of steps that leads to an error.

    Args:
        kind: "read before write", "overwritten before it was read" or "deadlock".
        operations: Sequence of operations.
        trace: One line for each step up to there, in order. For a deadlock, one line for each step
            that waits for ever.
        message: The error itself.
    """

    kind: str
    operations: tuple[Operation, ...]
    trace: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        sequence = ", ".join(f"{n}: {op}" for n, op in enumerate(self.operations))
        lines = [f"{self.kind} on {self.operations[0].size} ranks", f"operations: {sequence}"]
        return "\n".join([*lines, *(f"  {line}" for line in self.trace), self.message])


def describe(program: Program, trace: Sequence[int], problem: Problem) -> Violation:
    """Put a counterexample into words."""
    lines = [f"{n}. {text(program, step)}" for n, step in enumerate(trace, start=1)]
    if problem.kind == STALE:
        held = problem.held or "the sentinel"
        message = f"{problem.cell} holds {held}, and not {problem.wanted}"
    elif problem.kind == OVERWRITTEN:
        message = f"{problem.cell} still holds {problem.held}, and still to come is\n"
        message += f"  {text(program, problem.reader)}"
    else:
        lines = [text(program, step) + _came(program, step, problem.done) for step in trace]
        message = "no step is left that any rank could take"
    return Violation(problem.kind, program.operations, tuple(lines), message)


def text(program: Program, number: int) -> str:
    """A step of a trace: rank, CTA, operation, and what it does there."""
    place, step = program.events[number]
    who = f"rank {place.rank}" + ("" if step is None else f", CTA {place.cta}")
    operation = f"op {place.number} ({program.operations[place.number].kind})"
    return f"{who}, {operation}: {_action(program, number)}"


def _action(program: Program, number: int) -> str:
    step = program.events[number].step
    if step is None:
        return "ends"
    if isinstance(step, Arrive):
        return f"arrives at barrier {step.block}" + ("" if step.release else " (relaxed)")
    if isinstance(step, Wait):
        return f"waits for {program.thresholds[number]} arrivals at barrier {step.block}"
    return f"{step.verb} {_cells(tuple(step.values))}"


def _came(program: Program, number: int, done: int) -> str:
    step = program.events[number].step
    if not isinstance(step, Wait):
        return ""
    return f" ({(done & program.arrivals.get(step.block, 0)).bit_count()} came)"


def _cells(cells: tuple[Cell, ...]) -> str:
    """The elements by slot: `elements 2, 3 of barrier slot 0 on ranks 0, 1`."""
    by_slot: dict[tuple[int, str, int], list[int]] = {}
    for cell in cells:
        by_slot.setdefault((cell.rank, cell.memory, cell.slot), []).append(cell.element)
    on: dict[tuple[str, int, str], list[int]] = {}
    for (rank, memory, slot), indices in by_slot.items():
        data, flags = [i for i in indices if i >= 0], [-1 - i for i in indices if i < 0]
        names = [_counted("element", data)] * bool(data) + [_counted("flag", flags)] * bool(flags)
        on.setdefault((memory, slot, " and ".join(names)), []).append(rank)
    return "; ".join(
        f"{names} of {memory} slot {slot} on {_counted('rank', ranks)}"
        for (memory, slot, names), ranks in on.items()
    )


def _counted(word: str, numbers: list[int]) -> str:
    return f"{word}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
