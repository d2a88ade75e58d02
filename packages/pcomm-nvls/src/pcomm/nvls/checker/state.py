"""A state of a sequence: which steps are done, and what the elements hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pcomm.nvls.checker.program import Program
from pcomm.nvls.checker.steps import Cell, Value, Wait
from pcomm.nvls.checker.violation import OVERWRITTEN, STALE, Problem


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
