"""The checks: one sequence of operations, or all sequences up to a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from pcomm.nvls.checker.operation import Operation, Protocol
from pcomm.nvls.checker.program import build
from pcomm.nvls.checker.search import search
from pcomm.nvls.checker.violation import Violation, describe


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
        ConfigError: For an empty sequence, operations on different numbers of ranks, or more states
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
        ConfigError: As `check`.
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
