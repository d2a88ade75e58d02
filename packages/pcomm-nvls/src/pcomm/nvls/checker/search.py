"""All orders of the steps of a sequence, but for those that differ in independent steps alone.

A step that touches nothing which any other step could touch before it may be taken at once: every
order in which it comes later is the same as one in which it comes now (Godefroid's persistent
sets, of one step each). `_alone` finds such steps: it lets all others run as far as they can while
this one stands still. Where there is no such step, the search tries all of them. So a protocol
without races is explored in one order, and the branches are its races.
"""

from __future__ import annotations

from pcomm.core.errors import ConfigError
from pcomm.nvls.checker.counterexample import readable
from pcomm.nvls.checker.program import Program
from pcomm.nvls.checker.state import State, bits, passes, run, start
from pcomm.nvls.checker.steps import Cell
from pcomm.nvls.checker.violation import DEADLOCK, Problem

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
        ConfigError: Where there are more states.
    """
    visited = 0
    seen: set[tuple[int, frozenset[tuple[Cell, object]]]] = set()
    pending: list[tuple[State, _Path]] = [(start(program), None)]
    while pending:
        state, path = pending.pop()
        while True:
            visited += 1
            if visited > max_states:
                raise _too_many(program, max_states)
            numbers = _next(program, state)
            if not numbers:
                break
            after = []
            for number in numbers:
                found = run(program, number, state)
                if isinstance(found, Problem):
                    return visited, readable(program, [*_steps(path), number], found)
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


def _too_many(program: Program, max_states: int) -> ConfigError:
    sequence = ", ".join(map(str, program.operations))
    return ConfigError(
        f"check: {sequence}",
        found=f"more than {max_states} states",
        why="The protocol has races, or the sequence is long; no violation was found so far.",
        fix="Check a shorter sequence or fewer ranks, or raise max_states.",
    )
