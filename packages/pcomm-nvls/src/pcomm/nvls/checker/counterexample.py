"""A counterexample that is short and keeps the steps of a rank together."""

from __future__ import annotations

from pcomm.nvls.checker.program import Program
from pcomm.nvls.checker.state import passes, run, start
from pcomm.nvls.checker.violation import Problem


def readable(program: Program, steps: list[int], found: Problem) -> tuple[list[int], Problem]:
    """Return another order of fewer steps that ends in a problem of the same kind.

    Args:
        program: Graph of the sequence.
        steps: Steps in the order in which they were taken; the last one is the problem's.
        found: Problem at the last step.
    """
    for place in range(len(steps) - 2, -1, -1):
        fewer = steps[:place] + steps[place + 1 :]
        if (again := _replayed(program, fewer)) is not None and again.kind == found.kind:
            steps, found = fewer, again
    grouped = _by_rank(program, steps)
    if (again := _replayed(program, grouped)) is not None and again.kind == found.kind:
        return grouped, again
    return steps, found


def _by_rank(program: Program, steps: list[int]) -> list[int]:
    """The same steps, those of a rank one after another as long as it need not wait."""
    state, order, left = start(program), [], steps[:-1]
    rank = program.events[steps[-1]].place.rank
    while left:
        able = [
            n
            for n in left
            if state.ready >> n & 1 and passes(program, n, state.done, state.memory.get)
        ]
        able.sort(key=lambda n: program.events[n].place.rank != rank)
        for number in able:
            after = run(program, number, state)
            if not isinstance(after, Problem):
                break
        else:
            return steps
        state = after
        rank = program.events[number].place.rank
        order.append(number)
        left.remove(number)
    return [*order, steps[-1]]


def _replayed(program: Program, steps: list[int]) -> Problem | None:
    """The problem at the last of some steps; None if they cannot be taken, or are no problem."""
    state = start(program)
    for number in steps:
        if not state.ready >> number & 1:
            return None
        if not passes(program, number, state.done, state.memory.get):
            return None
        after = run(program, number, state)
        if isinstance(after, Problem):
            return after if number == steps[-1] else None
        state = after
    return None
