"""The search itself: against one that tries every order, and the rules of the memory."""

import random
from collections import Counter

import pytest

from nvls_support.protocols.program import (
    Arrive,
    Cell,
    Operation,
    Place,
    Poll,
    Read,
    Value,
    Wait,
    Write,
)
from nvls_support.protocols.search import check, check_sequences
from nvls_support.protocols.shipped import BARRIER_KINDS, LAMPORT_KINDS, WorkspaceProtocol


class EveryOrder:
    """Takes every step at every moment that the rules of `steps.py` allow: slow, and simple.

    A step is named by its place and its number within the CTA. Stores to several ranks arrive one
    by one, whoever reads them.
    """

    def __init__(self, protocol, operations):
        self.steps = {}
        self.operations = operations
        for number, operation in enumerate(operations):
            for rank in range(operation.size):
                for cta in range(operation.ctas_of(rank)):
                    place = Place(number, rank, cta)
                    self.steps[place] = list(self.atoms(protocol(operations, place)))

    @staticmethod
    def atoms(steps):
        for step in steps:
            if isinstance(step, Write):
                for rank in sorted({cell.rank for cell in step.values}):
                    yield Write({c: v for c, v in step.values.items() if c.rank == rank})
            else:
                yield step

    def is_ordered(self, earlier, later):
        """True if a step of a CTA completes before a later one of the CTA may begin."""
        if isinstance(earlier, Wait | Arrive):
            return True
        if isinstance(later, Wait | Arrive):
            return isinstance(later, Arrive) and later.release
        if isinstance(later, Write) and isinstance(earlier, Read | Poll):
            return True
        if isinstance(later, Read) and isinstance(earlier, Poll):
            return True
        return isinstance(earlier, Write) and bool(set(earlier.values) & set(later.values))

    def may_begin(self, place, index, done):
        for other, steps in self.steps.items():
            if (
                other.rank == place.rank
                and other.number < place.number
                and any((other, i) not in done for i in range(len(steps)))
            ):
                return False
        own = self.steps[place]
        # What is ordered through a step between them is ordered as well.
        return all((place, i) in done for i in range(index) if self.reaches(own, i, index))

    def reaches(self, own, i, index):
        if self.is_ordered(own[i], own[index]):
            return True
        between = range(i + 1, index)
        return any(self.is_ordered(own[i], own[j]) and self.reaches(own, j, index) for j in between)

    def epoch(self, place, index):
        before = [
            step
            for other in sorted(self.steps)
            if other.rank == place.rank and other <= place
            for step in self.steps[other][: index + 1 if other == place else None]
        ]
        return sum(step == self.steps[place][index] for step in before)

    def passes(self, place, index, done, memory):
        step = self.steps[place][index]
        if isinstance(step, Wait):
            arrived = sum(self.steps[p][i] == Arrive(step.block) for p, i in done) + sum(
                self.steps[p][i] == Arrive(step.block, release=False) for p, i in done
            )
            return arrived >= self.operations[0].size * self.epoch(place, index)
        return not isinstance(step, Poll) or all(memory.get(c) for c in step.values)

    def is_wrong(self, place, index, done, memory):
        step = self.steps[place][index]
        if isinstance(step, Read | Poll):
            return any(memory.get(cell) != value for cell, value in step.values.items())
        if isinstance(step, Write):
            return any(
                isinstance(reader, Read | Poll)
                and (other, i) not in done
                and any(c in step.values and memory.get(c) == v for c, v in reader.values.items())
                for other, steps in self.steps.items()
                for i, reader in enumerate(steps)
            )
        return False

    def is_safe(self):
        everything = {(place, i) for place, own in self.steps.items() for i in range(len(own))}
        pending, seen = [(frozenset(), ())], set()
        while pending:
            done, items = pending.pop()
            memory = dict(items)
            able = [
                (place, i)
                for place, i in everything - done
                if self.may_begin(place, i, done) and self.passes(place, i, done, memory)
            ]
            if not able and done != everything:
                return False
            for place, i in able:
                if self.is_wrong(place, i, done, memory):
                    return False
                step = self.steps[place][i]
                after = memory | dict(step.values) if isinstance(step, Write) else memory
                state = (done | {(place, i)}, tuple(sorted(after.items(), key=str)))
                if state not in seen:
                    seen.add(state)
                    pending.append(state)
        return True


class Damaged:
    """A workspace's protocol in which a few steps are missing, relaxed, or change their order."""

    def __init__(self, protocol, chance, damage):
        self.protocol, self.chance, self.damage = protocol, chance, damage

    def __call__(self, operations, place):
        steps = list(self.protocol(operations, place))
        steps = [s for s in steps if not isinstance(s, Read | Write | Poll) or s.values]
        chance = random.Random(f"{self.chance} {place}")
        if steps and chance.random() < self.damage:
            at = chance.randrange(len(steps))
            kind = chance.choice(["drop", "swap", "relax"])
            if kind == "drop":
                del steps[at]
            elif kind == "swap":
                steps[at - 1], steps[at] = steps[at], steps[at - 1]
            else:
                steps = [Arrive(s.block, False) if isinstance(s, Arrive) else s for s in steps]
        return steps


class Shuffled:
    """A few steps of one operation on three ranks, in an order that means nothing.

    Each element has one writer, and whoever reads it expects its value.
    """

    def __init__(self, chance):
        cells = [Cell(chance.randrange(3), "memory", 0, index) for index in range(3)]
        writers = {cell: (chance.randrange(3), chance.randrange(2)) for cell in cells}
        self.steps = {}
        for rank, cta in [(0, 0), (0, 1), (1, 0), (2, 0)]:
            own = [Wait(0)] * (chance.random() < 0.5) + [Wait(1)] * (chance.random() < 0.1)
            for cell in cells:
                writer, late = writers[cell]
                if (rank, cta) == (writer, late if writer == 0 else 0):
                    own.append(Write({cell: Value(0, writer)}))
                elif chance.random() < 0.3:
                    own.append(chance.choice([Read, Poll])({cell: Value(0, writer)}))
                elif chance.random() < 0.1:
                    own.append(Write({cell: chance.choice([None, Value(0, rank, True)])}))
            chance.shuffle(own)
            # Where everything is read too early, or waits for its own arrival, little is learnt.
            own.sort(key=lambda step: isinstance(step, Read) and chance.random() < 0.9)
            if cta == 0:
                own.insert(chance.choice([0, 0, 1, 2, len(own)]), Arrive(0, chance.random() < 0.8))
            own[:0] = [Arrive(1)] * (chance.random() < 0.7)
            self.steps[rank, cta] = own

    def __call__(self, operations, place):
        return self.steps[place.rank, place.cta]


def test_it_answers_as_a_search_that_tries_every_order():
    chance = random.Random(5)
    answers = Counter()
    operations = [Operation("shuffled", (0, 0, 0), (2, 1, 1))]
    for case in range(200):
        protocol = Shuffled(chance)
        found = check(protocol, operations)
        assert (found is None) == EveryOrder(protocol, operations).is_safe(), (case, str(found))
        answers[found and found.kind] += 1
    assert len(answers) == 4
    assert min(answers.values()) > 5, answers


def test_it_answers_so_for_damaged_protocols_of_a_workspace():
    chance = random.Random(5)
    answers = Counter()
    for case in range(12):
        kinds = [chance.choice(chance.choice([BARRIER_KINDS, LAMPORT_KINDS])) for _ in range(2)]
        operations = [Operation(kind, (1, 1)) for kind in kinds]
        protocol = WorkspaceProtocol(
            chance.choice([1, 2]), chance.choice([1, 2, 3]), chance.choice([True, False])
        )
        damaged = Damaged(protocol, case, 0.15)
        found = check(damaged, operations)
        assert (found is None) == EveryOrder(damaged, operations).is_safe(), (case, str(found))
        answers[found and found.kind] += 1
    assert len(answers) == 4


AG = Operation("all_gather", (1, 1))
ONE_SLOT = WorkspaceProtocol(slots=1, lamport_slots=3, entry_barriers=False)


def test_the_shortest_sequences_come_first():
    report = check_sequences(ONE_SLOT, [Operation("reduce_scatter", (1, 1)), AG], 3)
    assert report.violation is not None
    assert [operation.kind for operation in report.violation.operations] == ["reduce_scatter"] * 2
    assert report.num_sequences == 3
    assert report.num_states > 20


def test_a_protocol_without_races_has_one_order():
    steps_of_a_rank = 5
    assert check(ONE_SLOT, [AG], max_states=2 * steps_of_a_rank + 1) is None
    with pytest.raises(ValueError, match="more than 10 states"):
        check(ONE_SLOT, [AG], max_states=2 * steps_of_a_rank)


def test_others_may_come_first_when_one_of_them_lets_another_go_on():
    a, b = Cell(0, "memory", 0, 0), Cell(1, "memory", 0, 0)
    steps = {
        (0, 0): [Arrive(0), Wait(1)],
        (0, 1): [Write({a: Value(0, 0)})],
        (1, 0): [Write({b: Value(0, 1)}), Arrive(0), Arrive(1)],
        (2, 0): [Arrive(1), Arrive(0), Wait(0), Read({a: Value(0, 0)})],
    }

    def protocol(operations, place):
        return [*steps[place.rank, place.cta], *[Arrive(1)] * (place.cta == 1)]

    found = check(protocol, [Operation("one", (0, 0, 0), (2, 1, 1))])
    assert found is not None
    assert found.kind == "read before write"


# What the memory may do, shown by the smallest protocols that depend on it.

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
