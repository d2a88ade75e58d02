"""Gives requests their blocks and their state slot, and takes them back."""

from __future__ import annotations

from pcomm.inference.engine.live_request import NEVER, LiveRequest
from pcomm.inference.engine.memory.block_hashes import extend_hashes
from pcomm.inference.engine.memory.block_manager import BlockManager
from pcomm.inference.engine.memory.pools import Pools
from pcomm.inference.engine.memory.prefix_cache import PrefixCache, PrefixHit
from pcomm.inference.engine.memory.state_slots import StateSlots
from pcomm.inference.engine.runner.block_tables import BlockTables

__all__ = ["Allocator"]

# A claim makes the cache give up blocks while less than a quarter of the pool is free, and is at
# most an eighth of it: a cache that is full would otherwise leave no neighbours to any request.
_LARGEST_CLAIM, _LARGEST_RESERVE = 8, 4


class Allocator:
    """What scheduler and engine call when a request begins, grows, ends or is preempted.

    Args:
        pools: Memory of all layers; says which of the two kinds the model needs.
        blocks: Free and used blocks.
        slots: Free and used state slots.
        tables: Block tables of the running requests.
        cache: Keeps what ended requests have computed; None for nothing.
        block_size: Tokens of a block.
        snapshot_multiple: Snapshots of states are taken after a multiple of so many tokens, itself
            a multiple of `block_size`.
        snapshot_interval: Number of tokens between two snapshots while text is written, a multiple
            of `snapshot_multiple`.
    """

    def __init__(
        self,
        pools: Pools,
        blocks: BlockManager,
        slots: StateSlots,
        tables: BlockTables,
        cache: PrefixCache | None,
        *,
        block_size: int,
        snapshot_multiple: int,
        snapshot_interval: int,
    ) -> None:
        self._pools = pools
        self.blocks = blocks
        self.slots = slots
        self._tables = tables
        self._cache = cache
        self._block_size = block_size
        self._snapshot_multiple = snapshot_multiple
        self._snapshot_interval = snapshot_interval
        # Blocks of prompts that are being computed, by hashes that others may find soon.
        self._coming: dict[bytes, int] = {}
        self.num_looked_up = 0
        self.num_hit = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self._block_size) if self._pools.has_blocks else 0

    def is_coming(self, live: LiveRequest) -> bool:
        """Whether a running request computes most of the tokens of one that waits.

        It then better waits until that is done, and begins from there: continuations of one prompt
        arrive together.
        """
        if not self._coming or live.unknown_prompt_rows(0, live.num_prompt):
            return False
        most = (len(live.tokens) - 1) // self._block_size
        self._extend_hashes(live, most)
        return 2 * sum(self._coming.get(digest, 0) for digest in live.block_hashes[:most]) > most

    def admit(self, live: LiveRequest, *, headroom: int) -> bool:
        """Give a request that begins all blocks of its tokens, its state and a table row.

        Args:
            live: Request that holds nothing.
            headroom: Number of blocks that have to remain for others.

        Returns:
            False if there is not enough; the request holds nothing then.
        """
        hit = self._find(live)
        if hit.snapshot and not self._free_slot(keep=hit.snapshot):
            # The snapshot is in the only slot that there is; without it the request can begin.
            hit = PrefixHit(num_known=hit.num_known)
        for block in hit.blocks:
            self.blocks.retain(block)
        missing = self.blocks_for(len(live.tokens)) - len(hit.blocks)
        has_room = not missing or self._has_blocks(missing + headroom)
        if not has_room or not self._begin_state(live, hit):
            self._release_blocks(list(hit.blocks))
            return False
        if self._cache is not None and hit.num_tokens:
            self._cache.note_use(live.block_hashes[hit.num_tokens // self._block_size - 1])
        live.table_row = self._tables.take_row()
        live.num_computed = hit.num_tokens
        if live.cached_tokens is None:
            live.cached_tokens = hit.num_tokens
            self.num_looked_up += live.num_prompt
            self.num_hit += hit.num_tokens
        live.capacity = 0 if self._pools.has_blocks else NEVER
        self._append(live, list(hit.blocks))
        if missing:
            self._make_free(missing)
            live.claim = self._claim(self.blocks_for(live.limit - 1) - len(hit.blocks))
            self._allocate(live, missing)
        self._plan_to_keep(live, hit)
        self._note_coming(live)
        return True

    def extend(self, live: LiveRequest, num_tokens: int) -> bool:
        """Give a request blocks for its first `num_tokens` tokens; False if there are too few."""
        missing = self.blocks_for(num_tokens) - len(live.blocks)
        if missing <= 0:
            return True
        if not self._has_blocks(missing):
            return False
        self._make_free(missing)
        self._allocate(live, missing)
        return True

    def release(self, live: LiveRequest) -> None:
        """Take everything back that a request holds; nothing happens if that is nothing."""
        if live.table_row:
            self._tables.give_row_back(live.table_row, len(live.blocks))
        self.blocks.unclaim(live.claim)
        self._release_blocks(live.blocks)
        if live.state_slot:
            self.slots.give_back(live.state_slot)
        self._no_longer_coming(live)
        live.blocks.clear()
        live.claim = (0, 0)
        live.capacity = live.table_row = live.state_slot = live.num_computed = 0
        live.first_block = None

    def keep(self, live: LiveRequest) -> None:
        """Offer what a step has computed to the prefix cache, after the step has returned."""
        cache, computed = self._cache, live.num_computed
        if cache is None or computed < live.keep_at:
            return
        full = computed // self._block_size
        if computed >= live.coming_until:
            self._no_longer_coming(live)
        if self._pools.has_blocks and not live.is_orphan:
            self._extend_hashes(live, full)
            while live.num_published < full and not live.is_orphan:
                block = live.blocks[live.num_published]
                live.num_published += 1
                hashes = live.block_hashes[: live.num_published]
                live.is_orphan = not cache.publish_block(hashes[-2:], live.num_published, block)
        if live.snapshot_at and computed >= live.snapshot_at[0]:
            while live.snapshot_at and computed > live.snapshot_at[0]:
                live.snapshot_at.pop(0)
            if live.snapshot_at and computed == live.snapshot_at[0]:
                live.snapshot_at.pop(0)
                self._keep_state(live, cache, full)
            if not live.snapshot_at:
                interval = self._snapshot_interval
                live.snapshot_at.append((computed // interval + 1) * interval)
        self._set_keep_at(live)

    def withdraw(self, live: LiveRequest) -> None:
        """Take out of the prefix cache what a request has begun from or offered alone.

        Its logits were no numbers: so may be keys, values and states that others would begin from.
        """
        if self._cache is not None:
            self._cache.withdraw(live.block_hashes)

    def save_state(self, live: LiveRequest) -> int:
        """Copy the state of a request to a slot of its own, and return that; 0 if none is free."""
        if not self._free_slot(keep=0):
            return 0
        slot = self.slots.take()
        self._pools.copy(live.state_slot, slot)
        return slot

    def drop_saved(self, live: LiveRequest, slot: int, *, restore: bool) -> None:
        """Free a slot of `save_state`; with `restore` the request gets the state back first."""
        if restore:
            self._pools.copy(slot, live.state_slot)
        self.slots.give_back(slot)

    def _find(self, live: LiveRequest) -> PrefixHit:
        """What the cache has of a request; at least one token is left to be computed."""
        if self._cache is None or live.unknown_prompt_rows(0, live.num_prompt):
            return PrefixHit()
        most = (len(live.tokens) - 1) // self._block_size
        self._extend_hashes(live, most)
        return self._cache.find(live.block_hashes[:most])

    def _extend_hashes(self, live: LiveRequest, count: int) -> None:
        extend_hashes(live.block_hashes, live.tokens, block_size=self._block_size, count=count)

    def _begin_state(self, live: LiveRequest, hit: PrefixHit) -> bool:
        """Give a request its slot: zeros, or a copy of the snapshot."""
        if not self._pools.has_states:
            return True
        if not self._free_slot(keep=hit.snapshot):
            return False
        live.state_slot = self.slots.take()
        if hit.snapshot:
            self._pools.copy(hit.snapshot, live.state_slot)
        else:
            self._pools.zero(live.state_slot)
        return True

    def _free_slot(self, *, keep: int) -> bool:
        if self.slots.num_free:
            return True
        return self._cache is not None and self._cache.free_snapshot(keep=keep)

    def _plan_to_keep(self, live: LiveRequest, hit: PrefixHit) -> None:
        """Decide after which tokens of a prompt the state is copied: where requests part, and late.

        A snapshot is useful where other requests begin from it: behind what two of them have in
        common, and near the end of a prompt that comes again with more behind it.
        """
        live.num_published = len(hit.blocks)
        live.is_orphan = False
        live.snapshot_at = []
        if self._cache is not None and self._pools.has_states:
            multiple = self._snapshot_multiple
            wanted = {hit.num_known, len(live.tokens) - 1}
            aligned = {number - number % multiple for number in wanted}
            live.snapshot_at = sorted(number for number in aligned if number > hit.num_tokens)
            if not live.snapshot_at:
                interval = self._snapshot_interval
                live.snapshot_at = [(hit.num_tokens // interval + 1) * interval]
        self._set_keep_at(live)

    def _note_coming(self, live: LiveRequest) -> None:
        """Note what others can begin from soon: blocks, or for states what is behind a snapshot."""
        first = live.num_computed // self._block_size
        stop = (len(live.tokens) - 1) // self._block_size
        if self._cache is None or len(live.block_hashes) < stop:
            return
        ends = list(range(first + 1, stop + 1))
        if self._pools.has_states:
            at = [number // self._block_size for number in live.snapshot_at]
            ends = [end for end in at if end <= stop]
        live.coming_until = ends[-1] * self._block_size if ends else 0
        for end in ends:
            digest = live.block_hashes[end - 1]
            if digest not in self._coming:
                self._coming[digest] = end - first
                live.coming.append(digest)
            first = end

    def _no_longer_coming(self, live: LiveRequest) -> None:
        for digest in live.coming:
            del self._coming[digest]
        live.coming.clear()

    def _set_keep_at(self, live: LiveRequest) -> None:
        live.keep_at = live.snapshot_at[0] if live.snapshot_at else NEVER
        if self._cache is not None and self._pools.has_blocks and not live.is_orphan:
            live.keep_at = min(live.keep_at, (live.num_published + 1) * self._block_size)

    def _keep_state(self, live: LiveRequest, cache: PrefixCache, count: int) -> None:
        """Copy the state behind the first `count` blocks for the cache, if there is a slot."""
        self._extend_hashes(live, count)
        hashes = live.block_hashes[:count]
        if live.is_orphan or not cache.wants_snapshot(hashes[-1]) or not self._free_slot(keep=0):
            return
        slot = self.slots.take()
        self._pools.copy(live.state_slot, slot)
        cache.publish_snapshot(hashes, slot)

    def _has_blocks(self, count: int) -> bool:
        return count <= self.blocks.num_free + self.blocks.num_cached

    def _make_free(self, count: int) -> None:
        missing = count - self.blocks.num_free
        if missing > 0 and self._cache is not None:
            self._cache.free_blocks(missing)

    def _claim(self, count: int) -> tuple[int, int]:
        claim, blocks = self.blocks.claim(count), self.blocks
        if claim[1] or self._cache is None or count * _LARGEST_CLAIM > blocks.num_blocks:
            return claim
        if blocks.num_free * _LARGEST_RESERVE < blocks.num_blocks:
            self._cache.free_blocks(min(count, blocks.num_cached))
            claim = blocks.claim(count)
        return claim

    def _allocate(self, live: LiveRequest, count: int) -> None:
        last = live.blocks[-1] if live.blocks else 0
        self._append(live, self.blocks.allocate(count, after=last, claim=live.claim))

    def _append(self, live: LiveRequest, found: list[int]) -> None:
        if not found:
            return
        self._tables.write(live.table_row, len(live.blocks), found)
        if not live.blocks:
            live.first_block = found[0]
        last = live.blocks[-1] if live.blocks else found[0] - 1
        for block in found:
            if block != last + 1:
                live.first_block = None
            last = block
        live.blocks += found
        live.capacity = len(live.blocks) * self._block_size

    def _release_blocks(self, blocks: list[int]) -> None:
        # From the end, so that the first blocks of a prompt are given up last.
        for block in reversed(blocks):
            if self.blocks.release(block) and self._cache is not None:
                self._cache.note_idle(block)
