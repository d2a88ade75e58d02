"""What the memory may do, shown by the smallest protocols that depend on it."""

import pytest

from nvls_support.protocols.program import Arrive, Cell, Operation, Poll, Read, Value, Wait, Write
from nvls_support.protocols.search import check

LATE = "overwritten before it was read"
EARLY = "read before write"


def kind_of(*ranks, ctas=1):
    """The kind of the counterexample of an operation with these steps of each rank, or None."""

    def protocol(operations, place):
        return ranks[place.rank]

    found = check(protocol, [Operation("one", (0,) * len(ranks), ctas)])
    return found and found.kind


def cell(rank, element):
    return Cell(rank, "memory", 0, element)


def value(rank, reduced=False):
    return Value(0, rank, reduced)


def test_a_store_to_two_ranks_arrives_at_one_of_them_later():
    there, flag = cell(2, 0), cell(1, 0)
    last = [Arrive(0), Wait(0), Read({there: value(1)})]
    second = [Poll({flag: value(0)}), Write({there: value(1)}), Arrive(0)]
    # Rank 1 sees its own copy, but that of rank 2 may still be on its way.
    put = Write({flag: value(0), there: value(0)})
    assert kind_of([Arrive(0), put], second, last) == LATE
    one_by_one = [Write({there: value(0)}), Arrive(1), Write({flag: value(0)})]
    assert kind_of([Arrive(0), *one_by_one], second, last) is None


def test_data_before_a_flag_need_a_release():
    data, flag = cell(1, 0), cell(1, 1)
    receiver = [Poll({flag: value(0)}), Read({data: value(0)})]
    stores = [Write({data: value(0)}), Write({flag: value(0)})]
    assert kind_of(stores, receiver) == EARLY
    assert kind_of([stores[0], Arrive(0), stores[1]], receiver) is None
    assert kind_of([stores[0], Arrive(0, release=False), stores[1]], receiver) == EARLY
    # And the receiver has to poll first.
    assert kind_of([stores[0], Arrive(0), stores[1]], receiver[::-1]) == EARLY


def test_polls_do_not_wait_for_each_other():
    a, b = cell(1, 0), cell(1, 1)
    old, new = Write({b: value(0)}), Write({b: value(0, reduced=True)})
    sender = [old, Arrive(0), Wait(0), new, Arrive(1), Write({a: value(0)})]
    polls = [Poll({a: value(0)}), Poll({b: value(0, reduced=True)})]
    receiver = [Arrive(0), Wait(0)]
    assert kind_of(sender, [*receiver, *polls]) == EARLY
    # An arrival between them keeps the second one back.
    assert kind_of(sender, [*receiver, polls[0], Arrive(2), polls[1]]) is None


def test_a_store_waits_for_the_loads_that_it_may_depend_on():
    a, b = cell(0, 0), cell(1, 0)
    reader = [Arrive(0), Wait(0), Read({a: value(0)}), Write({b: value(1)})]
    writer = [Write({a: value(0)}), Arrive(0), Wait(0), Poll({b: value(1)}), Write({a: None})]
    assert kind_of(writer, reader) is None
    # Were the store not last, it would say nothing about the load.
    assert kind_of(writer, [*reader[:2], reader[3], reader[2]]) == LATE


def test_a_cta_reads_what_it_has_written_itself():
    own = cell(0, 0)
    assert kind_of([Write({own: value(0)}), Read({own: value(0)})]) is None
    # Another CTA of the rank reads at any time.
    steps = [Write({own: value(0)}), Read({own: value(0)})]
    found = check(lambda _, place: [steps[place.cta]], [Operation("one", (0,), 2)])
    assert found is not None
    assert found.kind == EARLY


@pytest.mark.parametrize("barriers", [1, 2])
def test_a_rank_counts_its_own_barriers(barriers):
    # Rank 1 leaves one out: its next arrival is for that one, and the last of rank 0 never ends.
    barrier = [Arrive(0), Wait(0)]
    assert kind_of(barrier * barriers, barrier * barriers) is None
    assert kind_of(barrier * barriers, barrier * (barriers - 1)) == "deadlock"
