"""What the cache finds, and what it gives up first."""

from array import array

from pcomm.inference.engine.pools import BlockManager, StateSlots
from pcomm.inference.engine.prefix_cache import EvictionQueue, PrefixCache, PrefixHit, extend_hashes


class Cache:
    """A cache over small pools, filled by whole prompts with blocks of one token."""

    def __init__(self, num_blocks=0, num_slots=0):
        self.blocks, self.slots = BlockManager(num_blocks), StateSlots(num_slots)
        self.cache = PrefixCache(
            self.blocks,
            self.slots,
            block_size=1,
            bytes_per_block=8 * bool(num_blocks),
            bytes_per_slot=8 * bool(num_slots),
        )

    def hashes(self, tokens):
        found = []
        extend_hashes(found, array("q", tokens), block_size=1, count=len(tokens))
        return found

    def keep(self, tokens, *, snapshots=()):
        """Publish a prompt that nobody uses any more, with snapshots behind some tokens."""
        hashes = self.hashes(tokens)
        own = self.blocks.allocate(len(tokens)) if self.blocks.size else []
        for number, block in enumerate(own, start=1):
            self.cache.publish_block(hashes[:number][-2:], number, block)
        for number in snapshots:
            assert self.cache.wants_snapshot(hashes[number - 1])
            self.cache.publish_snapshot(hashes[:number], self.slots.take())
        for block in reversed(own):
            if self.blocks.release(block):
                self.cache.note_idle(block)
        return own

    def find(self, tokens):
        return self.cache.find(self.hashes(tokens))


def test_the_longest_begin_is_found():
    cache = Cache(num_blocks=9)
    own = cache.keep([1, 2, 3])
    assert cache.find([1, 2, 4]) == PrefixHit(2, tuple(own[:2]), 0, 2)
    assert cache.find([2, 3]) == PrefixHit()
    # The same tokens again are blocks of their own, which are free at once.
    cache.keep([1, 2, 3, 4])
    assert cache.blocks.num_cached == 4
    assert cache.find([1, 2, 3, 4]).blocks[:3] == tuple(own)


def test_a_model_with_states_begins_at_a_snapshot():
    cache = Cache(num_blocks=9, num_slots=3)
    own = cache.keep([1, 2, 3, 4], snapshots=[2])
    assert cache.find([1, 2, 3, 5]) == PrefixHit(2, tuple(own[:2]), 1, 3)
    assert cache.find([1, 5]) == PrefixHit(num_known=1)
    # Not given up while it is in use.
    assert not cache.cache.free_snapshot(keep=1)
    assert cache.cache.free_snapshot()


def test_a_recurrent_model_has_snapshots_alone():
    cache = Cache(num_slots=2)
    cache.keep([1, 2, 3], snapshots=[2, 3])
    assert cache.find([1, 2, 4]) == PrefixHit(2, (), 1, 2)
    assert cache.cache.free_snapshot()
    assert cache.cache.free_snapshot()
    assert not cache.cache.free_snapshot()
    assert cache.slots.num_free == 2
    assert cache.find([1, 2, 3]) == PrefixHit()


def test_last_blocks_go_before_first_ones_and_old_prompts_before_new_ones():
    cache = Cache(num_blocks=6)
    cache.keep([1, 2, 3])
    cache.keep([4, 5, 6])
    cache.cache.free_blocks(2)
    assert cache.find([1, 2, 3]).num_tokens == 1
    assert cache.find([4, 5, 6]).num_tokens == 3
    cache.cache.free_blocks(2)
    assert cache.find([1]).num_tokens == 0
    assert cache.find([4, 5, 6]).num_tokens == 2


def test_blocks_behind_which_others_are_used_are_given_up_last():
    cache = Cache(num_blocks=3)
    cache.keep([1, 2])
    used = cache.blocks.allocate(1)
    hashes = cache.hashes([1, 2, 3])
    assert cache.cache.publish_block(hashes[-2:], 3, used[0])
    cache.cache.free_blocks(2)
    assert cache.blocks.num_free == 2
    # The used one has left the tree, so it is not found, and free at its end.
    assert cache.find([1, 2, 3]) == PrefixHit()
    assert not cache.blocks.release(used[0])
    # Behind what the cache does not have it keeps nothing.
    used = cache.blocks.allocate(1)
    assert not cache.cache.publish_block(hashes[-2:], 3, used[0])


def test_the_snapshot_that_saves_least_work_is_given_up_first():
    cache = Cache(num_slots=3)
    # Behind 2, 8 and 9 tokens: the last one saves 1 token over the one before it.
    cache.keep([1, 2, 3, 4, 5, 6, 7, 8, 9], snapshots=[2, 8, 9])
    cache.cache.free_snapshot()
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 8
    cache.cache.free_snapshot()
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 8


def test_blocks_without_a_snapshot_go_first_where_one_is_needed():
    cache = Cache(num_blocks=4, num_slots=1)
    cache.keep([1, 2], snapshots=[2])
    cache.keep([3, 4])
    cache.cache.free_blocks(2)
    assert cache.find([1, 2]).num_tokens == 2
    cache.cache.free_blocks(2)
    assert cache.slots.num_free == 1


def test_a_long_prompt_is_forgotten_without_recursion():
    cache = Cache(num_slots=1)
    cache.keep(range(5000), snapshots=[5000])
    cache.cache.clear()
    assert cache.find(range(5000)) == PrefixHit()
    blocks = Cache(num_blocks=5000)
    blocks.keep(range(5000))
    blocks.cache.clear()
    assert blocks.blocks.num_free == 5000


def test_old_entries_of_the_queue_lapse_and_are_dropped():
    newest = {}
    queue = EvictionQueue(lambda entry, number: newest[entry] == number)
    for round_number in range(200):
        for entry in ("a", "b"):
            newest[entry] = queue.put(entry, 1.0 + round_number % 3, queue.use())
    assert len(queue._heap) <= 70
    # The last credits are equal, so the order is that of use.
    assert [queue.pop(), queue.pop(), queue.pop()] == ["a", "b", None]
    # Worth ages: three entries of worth 1 are given up before one of worth 3 that is not used.
    newest["worthy"] = queue.put("worthy", 3.0, queue.use())
    given_up = []
    for number in range(5):
        newest[number] = queue.put(number, 1.0, queue.use())
        given_up.append(queue.pop())
    assert given_up == [0, 1, "worthy", 2, 3]
