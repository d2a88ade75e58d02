"""Protocols with a known mistake, one each: the checker has to find it, and to say what it is."""

from dataclasses import replace
from itertools import product

import pytest

from nvls_support.protocols.program import Arrive, Operation, Place, Poll, Read, Wait, Write
from nvls_support.protocols.search import check, check_sequences
from nvls_support.protocols.shipped import WorkspaceProtocol

SHIPPED = WorkspaceProtocol(slots=2, lamport_slots=3)
ONE_SLOT = WorkspaceProtocol(slots=1, lamport_slots=3, entry_barriers=False)
LATE = "overwritten before it was read"
EARLY = "read before write"


def two(kind, **options):
    return Operation(kind, (1, 1), **options)


def without(protocol, is_left_out):
    """The protocol without the steps for which `is_left_out(step, operation, place)` is true."""

    def steps(operations, place):
        operation = operations[place.number]
        return [s for s in protocol(operations, place) if not is_left_out(s, operation, place)]

    return steps


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce_one_shot"])
def test_one_buffer_and_no_entry_barrier(kind):
    # Megatron-LM #5748 for all-gathers; the same is latent there for reduce-scatters.
    found = check(ONE_SLOT, [two(kind), two(kind)])
    assert found.kind == LATE
    assert "still to come is\n  rank 0, CTA 0, op 0" in found.message
    assert check(replace(ONE_SLOT, entry_barriers=True), [two(kind), two(kind)]) is None
    assert check(ONE_SLOT, [two(kind)]) is None


def test_which_pairs_are_safe_in_one_buffer():
    kinds = ["all_gather", "reduce_scatter"]
    safe = [p for p in product(kinds, kinds) if check(ONE_SLOT, [two(k) for k in p]) is None]
    assert safe == [("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")]
    # Only since both have the same shape, so that a rank touches the same segment in both.
    other = Operation("all_gather", (2, 1))
    assert check(ONE_SLOT, [two("reduce_scatter"), other]).kind == LATE


def test_lamport_clears_the_next_slot():
    # vllm #53000: what a faster rank has written for the next operation is erased.
    operation = two("lamport_all_gather")
    found = check_sequences(replace(SHIPPED, clear_ahead=1), [operation], 5).violation
    assert found.kind == LATE
    assert len(found.operations) == 4
    assert found.trace[-1].endswith("clears elements 0, 1 of lamport slot 0 on rank 0")
    assert "rank 1 wrote in operation 3" in found.message


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_lamport_with_two_slots(kind):
    found = check_sequences(replace(SHIPPED, lamport_slots=2), [two(f"lamport_{kind}")], 4)
    assert found.violation.kind == LATE


class ClearsItsOwnSize(WorkspaceProtocol):
    """Clears as many elements as the operation at hand has, and not those that were written."""

    def dirty(self, operations, number, rank):
        slot = (self.lamport_slot(operations, number) + self.clear_ahead) % self.lamport_slots
        return self.received(operations, number, rank, slot)


def test_lamport_clears_less_than_was_written():
    large, small = Operation("lamport_all_gather", (2, 2)), two("lamport_all_gather")
    wrong = ClearsItsOwnSize(2, 3)
    assert check(wrong, [large] * 5) is None
    found = check_sequences(wrong, [large, small], 4).violation
    assert found.kind == EARLY
    # The fourth operation finds what the first one left in the slot.
    assert "wrote in operation 0, and not the data" in found.message
    assert found.operations == (large, small, large, large)


class WithoutFlags(WorkspaceProtocol):
    """Lamport operations that send data alone."""

    def sends_flags(self, operation):
        return False


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("lamport_gather", (1, 1)), ("lamport_all_gather", (1, 0)), ("lamport_all_reduce", (0, 0))],
)
def test_lamport_without_flags_where_no_rank_needs_the_data_of_another(kind, counts):
    operation = Operation(kind, counts)
    mixed = [operation, two("lamport_all_gather")]
    found = check_sequences(WithoutFlags(2, 3), mixed, 4).violation
    assert found.kind in (EARLY, LATE)
    assert operation in found.operations
    assert check_sequences(SHIPPED, mixed, 4).violation is None


def test_a_rank_without_tokens_that_skips_the_barrier():
    def returns_early(step, operation, place):
        return operation.counts[place.rank] == 0

    empty = Operation("all_gather", (1, 0))
    wrong = without(SHIPPED, returns_early)
    found = check(wrong, [empty])
    assert found.kind == "deadlock"
    assert found.trace == (
        "rank 0, CTA 0, op 0 (all_gather): waits for 2 arrivals at barrier 0 (1 came)",
    )
    # Its next arrival is taken for the one that is missing, and the others go on a barrier early.
    found = check(wrong, [empty, two("all_gather")])
    assert found is not None
    assert check_sequences(SHIPPED, [empty, two("all_gather")], 3).violation is None


def test_a_rank_without_tokens_that_sends_no_flag():
    def is_silent(step, operation, place):
        return isinstance(step, Write) and step.verb == "puts" and not operation.counts[place.rank]

    found = check(without(SHIPPED, is_silent), [Operation("lamport_all_gather", (1, 0))])
    assert found.kind == "deadlock"
    assert "polls flag 1 of lamport slot 0 on rank 0" in found.trace[0]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce_one_shot"])
def test_a_barrier_that_was_left_out_on_all_ranks(kind):
    wrong = without(SHIPPED, lambda step, *_: isinstance(step, Arrive | Wait))
    assert check(wrong, [two(kind)]).kind == EARLY


@pytest.mark.parametrize("left", [0, 1])
def test_either_barrier_of_a_two_shot_all_reduce_that_was_left_out(left):
    def steps(operations, place):
        own = list(SHIPPED(operations, place))
        at = [n for n, step in enumerate(own) if isinstance(step, Arrive)][left]
        return own[:at] + own[at + 2 :]

    assert check(steps, [two("all_reduce_two_shot")]).kind in (EARLY, LATE)


def test_a_wait_without_the_arrival_and_an_arrival_without_the_wait():
    def of_rank_1(kind):
        return lambda step, _, place: place.rank == 1 and isinstance(step, kind)

    operations = [two("all_gather")]
    assert check(without(SHIPPED, of_rank_1(Arrive)), operations).kind == "deadlock"
    assert check(without(SHIPPED, of_rank_1(Wait)), operations).kind == EARLY


def test_an_arrival_that_does_not_release():
    def relaxed(operations, place):
        own = SHIPPED(operations, place)
        return [replace(s, release=False) if isinstance(s, Arrive) else s for s in own]

    assert check(relaxed, [two("all_gather")]).kind == EARLY


def test_ranks_with_different_numbers_of_ctas():
    found = check(SHIPPED, [Operation("all_gather", (1, 1), ctas=(1, 2))])
    assert found.kind == "deadlock"
    assert "rank 1, CTA 1, op 0 (all_gather): waits for 2 arrivals" in found.trace[0]
    # Where the second CTA has a part, the other rank's only CTA does not wait for it.
    assert check(SHIPPED, [Operation("all_gather", (2, 2), ctas=(1, 2))]).kind == EARLY
    assert check(SHIPPED, [Operation("all_gather", (2, 2), ctas=2)]) is None


def replayed(times, *slots):
    """A graph that captured all-gathers in some slots, replayed several times."""
    return [
        two("all_gather", slot=slot, seam=number == 0)
        for _ in range(times)
        for number, slot in enumerate(slots)
    ]


def test_the_seam_of_a_graph_with_an_odd_number_of_operations():
    wrong = replace(SHIPPED, entry_barriers=False)
    found = check(wrong, replayed(2, 0, 1, 0))
    assert found.kind == LATE
    assert "barrier slot 0" in found.message
    assert check(SHIPPED, replayed(2, 0, 1, 0)) is None
    # An even number needs none, but the first operation cannot know what ran before.
    assert check(wrong, replayed(2, 0, 1)) is None
    first, second = [list(SHIPPED(replayed(1, 0, 1), Place(n, 0, 0))) for n in (0, 1)]
    assert [type(step) for step in first] == [Arrive, Wait, Write, Arrive, Wait, Read]
    assert [type(step) for step in second] == [Write, Arrive, Wait, Read]


class KnownSeams(WorkspaceProtocol):
    """Entry barriers where the host was told of a seam; it sees no replay by itself."""

    def enters(self, operations, number):
        return operations[number].seam


def test_an_operation_outside_after_a_replay():
    # The host issued slot 1 and captured slots 0, 1, 0; it replays, and goes on with slot 0.
    host = KnownSeams(2, 3)
    before, after = two("all_gather", slot=1), two("all_gather", slot=0)
    assert check(host, [before, after]) is None
    assert check(host, [before, *replayed(2, 0, 1, 0), after]).kind == LATE
    seam = replace(after, seam=True)
    assert check(host, [before, *replayed(2, 0, 1, 0), seam]) is None
    # With slots of its own, a graph does not matter to the operations outside.
    assert check(host, [before, *replayed(2, 2, 3, 2), after]) is None


class SlotsOfTheHost(WorkspaceProtocol):
    """Lamport slots that a graph captures, where each replay begins with the first one."""

    def lamport_slot(self, operations, number):
        seams = [n for n in range(number + 1) if operations[n].seam]
        return (number - seams[-1]) % self.lamport_slots


@pytest.mark.parametrize("captured", [1, 2, 4])
def test_lamport_slots_that_a_graph_captured(captured):
    graph = [two("lamport_all_gather", seam=number == 0) for number in range(captured)]
    assert check(SlotsOfTheHost(2, 3), graph * 3) is not None
    assert check(SHIPPED, graph * 3) is None


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce_one_shot"])
def test_a_view_that_is_written_before_the_entry_barrier(kind):
    # A GEMM writes its result into the slot, and the entry barrier is in the kernel after it.
    def steps(operations, place):
        own = list(SHIPPED(operations, place))
        return sorted(own, key=lambda step: not isinstance(step, Write))

    assert check_sequences(steps, [two(kind)], 4).violation is None
    seam = [two(kind, slot=0), two(kind, slot=0, seam=True)]
    assert check(SHIPPED, seam) is None
    assert check(steps, seam).kind == LATE


@pytest.mark.parametrize(("late", "kind"), [(0, None), (1, LATE), (2, LATE)])
def test_a_view_that_is_read_after_later_operations_were_launched(late, kind):
    # The result stays in the slot, and another kernel reads it, `late` operations later.
    def steps(operations, place):
        own = [s for s in SHIPPED(operations, place) if not isinstance(s, Read)]
        if place.number >= late:
            earlier = SHIPPED(operations, place._replace(number=place.number - late))
            own += [step for step in earlier if isinstance(step, Read)]
        return own

    found = check_sequences(steps, [two("all_gather")], 4).violation
    assert (found and found.kind) == kind


def test_a_poll_that_does_not_wait_is_a_read():
    def steps(operations, place):
        own = SHIPPED(operations, place)
        return [Read(s.values) if isinstance(s, Poll) else s for s in own]

    found = check(steps, [two("lamport_all_gather")])
    assert found.kind == EARLY
    assert "holds the sentinel, and not the data that rank" in found.message
