"""What the checker found, as a trace that can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pcomm.nvls.checker.operation import Operation
from pcomm.nvls.checker.program import Program
from pcomm.nvls.checker.steps import Arrive, Cell, Value, Wait

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
        trace: One line for each step that is needed to get there, in order. For a deadlock, one
            line for each step that waits for ever.
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
