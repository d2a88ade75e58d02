"""The protocols of a workspace have no counterexample within these bounds."""

import random
from dataclasses import replace
from itertools import product

import pytest

from nvls_support.protocols.program import Operation
from nvls_support.protocols.search import Report, check, check_sequences
from nvls_support.protocols.shipped import BARRIER_KINDS, LAMPORT_KINDS, WorkspaceProtocol
from pcomm.nvls.primitives.lamport_numbers import LAMPORT_SLOTS
from pcomm.nvls.workspace.slots import SLOTS

SHIPPED = WorkspaceProtocol(slots=SLOTS, lamport_slots=LAMPORT_SLOTS)
KINDS = (*BARRIER_KINDS, *LAMPORT_KINDS)
# One of each way to share memory: a slot that all write, one that two phases use, two of Lamport.
FEW_KINDS = ("all_gather", "all_reduce_two_shot", "lamport_all_reduce", "lamport_gather")
NUM_LONG = (80, pytest.param(400, marks=pytest.mark.soak))


def alphabet(kinds, *counts, ctas=(1,)):
    return [Operation(kind, own, number) for kind in kinds for own in counts for number in ctas]


def proven(report: Report, num_sequences: int) -> bool:
    assert report.violation is None, str(report.violation)
    assert report.num_sequences == num_sequences
    return True


def sequences(letters, length):
    return sum(letters**n for n in range(1, length + 1))


def test_all_operations_in_any_order_on_two_ranks():
    # More operations than barrier slots; of four kinds, also than Lamport slots.
    assert proven(check_sequences(SHIPPED, alphabet(KINDS, (1, 1)), 3), sequences(9, 3))
    assert proven(check_sequences(SHIPPED, alphabet(FEW_KINDS, (1, 1)), 4), sequences(4, 4))


def test_all_operations_in_any_order_on_three_ranks():
    assert proven(check_sequences(SHIPPED, alphabet(FEW_KINDS, (1, 1, 1)), 3), sequences(4, 3))


@pytest.mark.soak
def test_all_operations_in_longer_orders():
    assert proven(check_sequences(SHIPPED, alphabet(KINDS, (1, 1)), 4), sequences(9, 4))
    assert proven(check_sequences(SHIPPED, alphabet(KINDS, (1, 1, 1)), 3), sequences(9, 3))


@pytest.mark.parametrize("kinds", [BARRIER_KINDS, LAMPORT_KINDS], ids=["barrier", "lamport"])
def test_counts_that_differ_with_ranks_without_any(kinds):
    counts = [(1, 1), (0, 2), (1, 0), (0, 0)]
    letters = alphabet(kinds, *counts)
    assert proven(check_sequences(SHIPPED, letters, 2), sequences(len(letters), 2))
    few = alphabet((*kinds[:1], *kinds[-2:]), (2, 0), (0, 1))
    assert proven(check_sequences(SHIPPED, few, 3), sequences(6, 3))


@pytest.mark.parametrize("kinds", [BARRIER_KINDS, LAMPORT_KINDS], ids=["barrier", "lamport"])
def test_grids_of_one_and_two_ctas(kinds):
    letters = alphabet(kinds, (2, 2), ctas=(1, 2))
    assert proven(check_sequences(SHIPPED, letters, 2), sequences(len(letters), 2))
    few = alphabet(kinds[:: len(kinds) // 2], (2, 2), ctas=(1, 2))
    assert proven(check_sequences(SHIPPED, few, 3), sequences(len(few), 3))


def test_two_ctas_on_three_ranks():
    letters = alphabet(
        ("all_gather", "all_reduce_two_shot", *LAMPORT_KINDS), (2, 1, 2), ctas=(1, 2)
    )
    assert proven(check_sequences(SHIPPED, letters, 2), sequences(len(letters), 2))


@pytest.mark.parametrize(
    ("size", "num_letters"),
    [(2, 3), (3, 2), *(pytest.param(size, 6 - size, marks=pytest.mark.soak) for size in (2, 3))],
)
def test_lamport_operations_of_all_sizes_through_all_slots(size, num_letters):
    # Five operations: the fourth has the slot of the first, and the fifth that of the second.
    letters = [
        Operation("lamport_all_reduce", (2,) + (1,) * (size - 1)),
        Operation("lamport_all_gather", (0,) * (size - 1) + (2,)),
        Operation("lamport_gather", (1,) * size, root=size - 1),
        Operation("lamport_all_gather", (1,) * size),
    ][:num_letters]
    assert proven(check_sequences(SHIPPED, letters, 5), sequences(len(letters), 5))


def test_one_slot_with_entry_barriers():
    one = replace(SHIPPED, slots=1)
    assert proven(check_sequences(one, alphabet(BARRIER_KINDS, (1, 1)), 3), sequences(5, 3))
    assert proven(check_sequences(one, alphabet(BARRIER_KINDS, (1, 1, 1)), 2), sequences(5, 2))


@pytest.mark.parametrize(
    "few",
    [
        ("all_gather", "all_reduce_two_shot"),
        pytest.param(
            ("all_gather", "reduce_scatter", "all_reduce_two_shot"), marks=pytest.mark.soak
        ),
    ],
    ids=len,
)
def test_a_seam_between_any_slots(few):
    # What a graph captured ends and begins with any slot, and so does what comes after it.
    for slots in product((0, 1), repeat=4):
        for kinds in product(few, repeat=4):
            operations = [
                Operation(kind, (1, 1), slot=slot, seam=number in (1, 3))
                for number, (kind, slot) in enumerate(zip(kinds, slots, strict=True))
            ]
            violation = check(SHIPPED, operations)
            assert violation is None, str(violation)


@pytest.mark.parametrize(("slots", "lamport_slots"), [(3, 5), (4, 4)])
def test_more_slots_than_needed(slots, lamport_slots):
    protocol = WorkspaceProtocol(slots, lamport_slots, clear_ahead=2)
    letters = [Operation("all_gather", (1, 1)), Operation("lamport_all_gather", (1, 1))]
    assert proven(check_sequences(protocol, letters, 6), sequences(2, 6))


class AlwaysFlags(WorkspaceProtocol):
    """Flags in every Lamport operation, as where the host does not know the counts."""

    def sends_flags(self, operation):
        return True


def test_flags_that_are_not_needed():
    letters = alphabet(LAMPORT_KINDS, (1, 1), (0, 2))
    assert proven(check_sequences(AlwaysFlags(2, 3), letters, 2), sequences(8, 2))
    assert proven(check_sequences(AlwaysFlags(2, 3), letters[::5], 5), sequences(2, 5))


def test_all_operations_with_all_counts_and_grids():
    letters = alphabet(KINDS, (1, 2), ctas=(1, 2)) + alphabet(KINDS, (0, 1))
    assert proven(check_sequences(SHIPPED, letters, 2), sequences(27, 2))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", NUM_LONG)
def test_long_sequences_of_anything(size, number):
    chance = random.Random(size)
    for _ in range(number // size):
        operations = [
            Operation(
                chance.choice(KINDS),
                tuple(chance.choices((0, 1, 2), k=size)),
                ctas=chance.choice((1, 1, 2, 3)),
                root=chance.randrange(size),
            )
            for _ in range(7)
        ]
        # From there on, slots begin again in any one, as in a graph.
        at = chance.randrange(7)
        operations[at] = replace(operations[at], seam=True, slot=chance.randrange(2))
        violation = check(SHIPPED, operations)
        assert violation is None, str(violation)
