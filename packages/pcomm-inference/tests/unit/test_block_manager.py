"""Blocks are free, used or cached, never two of these, and neighbours where there are some."""

from hypothesis import given
from hypothesis import strategies as st

from pcomm.inference.engine.pools import BlockManager


def test_requests_get_ascending_neighbours_and_keep_them_while_they_grow():
    blocks = BlockManager(20)
    reservations = [blocks.reserve(8), blocks.reserve(8)]
    assert reservations == [(1, 9), (9, 17)]
    own = [blocks.allocate(3, reservation=reservation) for reservation in reservations]
    for _ in range(5):
        for number, reservation in enumerate(reservations):
            own[number] += blocks.allocate(1, after=own[number][-1], reservation=reservation)
    assert own == [list(range(1, 9)), list(range(9, 17))]


def test_reserved_blocks_are_taken_last_also_where_others_took_and_gave_them_back():
    blocks = BlockManager(6)
    reservation = blocks.reserve(4)
    assert blocks.allocate(2) == [5, 6]
    assert blocks.allocate(1) == [1]
    # The reservation's own request goes on behind what others took of it.
    assert blocks.allocate(2, reservation=reservation) == [2, 3]
    blocks = BlockManager(5)
    blocks.reserve(2)
    for block in blocks.allocate(4):
        blocks.release(block)
    assert blocks.allocate(3) == [3, 4, 5]


def test_a_run_is_found_before_scattered_blocks_and_a_reservation_is_a_run():
    blocks = BlockManager(9)
    taken = blocks.allocate(9)
    for block in (2, 4, 6, 7, 8):
        blocks.release(taken[block - 1])
    assert blocks.reserve(4) == blocks.reserve(0) == (0, 0)
    assert blocks.allocate(3) == [6, 7, 8]
    assert blocks.allocate(2) == [2, 4]


@given(st.lists(st.tuples(st.sampled_from("acurpi"), st.integers(0, 9)), max_size=60))
def test_counts_are_those_of_a_model_of_sets(steps):
    blocks, references, published, reservations = BlockManager(9), {}, set(), []
    for kind, number in steps:
        used = sorted(block for block, count in references.items() if count)
        if kind == "a" and number <= blocks.num_free:
            reservation = reservations[-1] if reservations else (0, 0)
            found = blocks.allocate(number, after=used[-1] if used else 0, reservation=reservation)
            assert len(set(found)) == number
            assert all(1 <= b <= 9 and not references.get(b) and b not in published for b in found)
            references |= dict.fromkeys(found, 1)
        elif kind == "c":
            reservations.append(blocks.reserve(number))
        elif kind == "u" and reservations:
            blocks.unreserve(reservations.pop())
        elif kind == "r" and used:
            block = used[number % len(used)]
            references[block] -= 1
            is_cached = not references[block] and block in published
            assert blocks.release(block) == is_cached == blocks.is_cached(block)
        elif kind == "p" and used:
            published.add(used[number % len(used)])
            blocks.publish(used[number % len(used)])
        elif kind == "i" and published:
            block = sorted(published)[number % len(published)]
            if number % 2:
                published.discard(block)
                blocks.unpublish(block)
            else:
                references[block] = references.get(block, 0) + 1
                blocks.retain(block)
        num_used = sum(1 for count in references.values() if count)
        num_cached = sum(1 for block in published if not references[block])
        assert (blocks.num_used, blocks.num_cached) == (num_used, num_cached)
        assert blocks.num_free == 9 - num_used - num_cached
