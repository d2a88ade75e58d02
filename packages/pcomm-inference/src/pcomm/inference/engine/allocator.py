"""Allocates the pools, gives requests their blocks and their state slot, and takes them back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.inference.engine.limits import EngineSettings
from pcomm.inference.engine.pools import BlockManager, BlockTables, Pools, StateSlots
from pcomm.inference.engine.prefix_cache import PrefixCache, PrefixHit, extend_hashes
from pcomm.inference.engine.request import NEVER, RequestState
from pcomm.inference.engine.stats import PoolUse
from pcomm.inference.model import KVSpec, LayerSpec

__all__ = ["SNAPSHOT_INTERVAL", "STATE_CHUNK", "Allocator"]

STATE_CHUNK = 64
"""Tokens that kernels of recurrent layers compute at once. Chunks of a prompt, and the snapshots of
the prefix cache, end at multiples of it, so that a prompt that is cut is computed like a whole one.
"""

SNAPSHOT_INTERVAL = 256
"""Tokens between two snapshots while text is written, so that the next turn of a chat begins from
its middle; a copy for so many steps costs less than 1 % of what they move."""

# The cache gives up blocks for reservations of at most an eighth of the pool, while less than a
# quarter of it is free: a full cache would otherwise leave no neighbours to any request.
_POOL_OVER_RESERVATION, _POOL_OVER_FREE = 8, 4


class Allocator:
    """Allocates the pools that a model declares, and gives their places to requests.

    Args:
        specs: Declarations of the model, one for each layer.
        settings: Sizes of the pools, and whether what ended requests have computed is kept.
        device: Device of the model.

    Attributes:
        pools: Tensors of all layers.
        blocks: Free, used and cached KV blocks.
        slots: Free, used and cached state slots.
        tables: Block tables of the running requests.
        chunk_multiple: Number of tokens; chunks of prompts end at multiples of it, where they can.
        num_looked_up: Number of tokens in prompts of requests that began.
        num_hit: Number of those that the prefix cache had.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], settings: EngineSettings, device: torch.device
    ) -> None:
        size = self._block_size = settings.block_size
        self._most_new = settings.max_batch_tokens
        windows = [spec.window for spec in specs if isinstance(spec, KVSpec)]
        # Most keys that a layer sees; NEVER if one sees all.
        self._window = max([window or NEVER for window in windows], default=NEVER)
        self.pools = Pools(specs, settings, device)
        has_blocks, has_states = self.pools.has_blocks, self.pools.has_states
        # The last token of a request is never computed.
        self.tables = BlockTables(
            settings.max_requests, self.blocks_for(settings.max_model_len - 1), device
        )
        self.blocks = BlockManager(settings.num_blocks if has_blocks else 0)
        self.slots = StateSlots(settings.num_state_slots if has_states else 0)
        self._cache: PrefixCache | None = None
        if settings.prefix_cache and not settings.batch_invariant and (has_blocks or has_states):
            self._cache = PrefixCache(
                self.blocks,
                self.slots,
                block_size=size,
                bytes_per_block=self.pools.bytes_per_block,
                bytes_per_slot=self.pools.bytes_per_slot,
            )
        multiple = self._snapshot_multiple = -(-STATE_CHUNK // size) * size
        self._snapshot_interval = -(-SNAPSHOT_INTERVAL // multiple) * multiple
        self.chunk_multiple = multiple if has_states else 1
        # Blocks of prompts that are being computed, by hashes that others may find soon.
        self._in_flight: dict[bytes, int] = {}
        self.num_looked_up = 0
        self.num_hit = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self._block_size) if self.pools.has_blocks else 0

    def most_blocks(self, num_tokens: int) -> int:
        """Number of blocks that a request of `num_tokens` tokens holds at once, at most.

        Where every layer has a window these are the blocks of a window and of a chunk behind it.
        """
        held = min(num_tokens, self._window - 1 + self._most_new)
        # So many neighbouring tokens may begin and end within a block.
        begun = (held + self._block_size - 2) // self._block_size + 1
        return min(self.blocks_for(num_tokens), begun)

    def wanted_tokens(self, live: RequestState) -> int:
        """Number of tokens that a request needs blocks for in the next step: with windows few."""
        known = len(live.tokens)
        return known if self._window == NEVER else min(known, live.num_computed + self._most_new)

    def is_prefix_in_flight(self, live: RequestState) -> bool:
        """Whether a running request computes most of the tokens of one that waits.

        It then better waits until that is done, and begins from there: continuations of one prompt
        arrive together.
        """
        if not self._in_flight or live.unknown_prompt_rows(0, live.num_prompt):
            return False
        most = (len(live.tokens) - 1) // self._block_size
        self._extend_hashes(live, most)
        return 2 * sum(self._in_flight.get(digest, 0) for digest in live.block_hashes[:most]) > most

    def admit(self, live: RequestState, *, headroom: int) -> bool:
        """Give a request its state, a table row and blocks for all its tokens, cached ones first.

        Where every layer has a window it gets those of its first chunk, and of the window before.

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
        unseen = self._num_unseen(hit.num_tokens)
        held = [0] * min(unseen, len(hit.blocks)) + list(hit.blocks[unseen:])
        for block in filter(None, held):
            self.blocks.retain(block)
        live.num_computed = hit.num_tokens
        missing = self.blocks_for(self.wanted_tokens(live)) - len(held)
        has_room = not missing or self._has_blocks(missing + headroom)
        if not has_room or not self._begin_state(live, hit):
            self._release_blocks(held)
            live.num_computed = 0
            return False
        if self._cache is not None and hit.num_tokens:
            self._cache.note_use(live.block_hashes[hit.num_tokens // self._block_size - 1])
        live.table_row = self.tables.take_row()
        if live.cached_tokens is None:
            live.cached_tokens = hit.num_tokens
            self.num_looked_up += live.num_prompt
            self.num_hit += hit.num_tokens
        live.capacity = 0 if self.pools.has_blocks else NEVER
        self._append(live, held)
        if unseen:
            live.num_given_back, live.first_block = held.count(0), None
        if missing:
            self._make_free(missing)
            more = self.most_blocks(live.limit - 1) - len(hit.blocks) + live.num_given_back
            live.reservation = self._reserve(max(more, missing))
            self._allocate(live, missing)
        self._plan_snapshots(live, hit)
        self._note_in_flight(live)
        return True

    def extend(self, live: RequestState, num_tokens: int) -> bool:
        """Give a request blocks for its first `num_tokens` tokens; False if there are too few."""
        missing = self.blocks_for(num_tokens) - len(live.blocks)
        if missing <= 0:
            return True
        if not self._has_blocks(missing):
            return False
        self._make_free(missing)
        self._allocate(live, missing)
        return True

    def release(self, live: RequestState) -> None:
        """Take everything back that a request holds; nothing happens if that is nothing."""
        if live.table_row:
            self.tables.give_row_back(live.table_row, len(live.blocks))
        self.blocks.unreserve(live.reservation)
        self._release_blocks(live.blocks)
        if live.state_slot:
            self.slots.give_back(live.state_slot)
        self._end_in_flight(live)
        live.blocks.clear()
        live.reservation = (0, 0)
        live.capacity = live.table_row = live.state_slot = live.num_computed = 0
        live.num_given_back = 0
        live.first_block = None

    def note_computed(self, live: RequestState) -> None:
        """Offer what a step has computed to the prefix cache, and take back blocks before windows.

        Call it after the step has returned. The cache may keep blocks that are taken back.
        """
        if live.num_computed < live.note_at:
            return
        if self._cache is not None:
            self._offer(live, self._cache)
        self._give_back(live)
        self._set_note_at(live)

    def _offer(self, live: RequestState, cache: PrefixCache) -> None:
        computed = live.num_computed
        full = computed // self._block_size
        if self.pools.has_blocks and not live.is_orphan:
            self._extend_hashes(live, full)
            while live.num_published < full and not live.is_orphan:
                block = live.blocks[live.num_published]
                live.num_published += 1
                hashes = live.block_hashes[: live.num_published]
                live.is_orphan = not cache.publish_block(hashes[-2:], live.num_published, block)
        if computed >= live.in_flight_until or live.is_orphan:
            self._end_in_flight(live)
        if live.snapshot_at and computed >= live.snapshot_at[0]:
            while live.snapshot_at and computed > live.snapshot_at[0]:
                live.snapshot_at.pop(0)
            if live.snapshot_at and computed == live.snapshot_at[0]:
                live.snapshot_at.pop(0)
                self._cache_state(live, cache, full)
            if not live.snapshot_at:
                interval = self._snapshot_interval
                live.snapshot_at.append((computed // interval + 1) * interval)

    def _num_unseen(self, num_computed: int) -> int:
        """Number of blocks that no token sees which is computed behind so many."""
        return max(0, num_computed + 1 - self._window) // self._block_size

    def _give_back(self, live: RequestState) -> None:
        first, stop = live.num_given_back, self._num_unseen(live.num_computed)
        if stop <= first:
            return
        self._release_blocks(live.blocks[first:stop])
        zeros = [0] * (stop - first)
        live.blocks[first:stop] = zeros
        self.tables.write(live.table_row, first, zeros)
        live.num_given_back, live.first_block = stop, None

    def withdraw(self, live: RequestState) -> None:
        """Take out of the prefix cache what a request has begun from or offered alone.

        Its logits were no numbers: so may be keys, values and states that others would begin from.
        """
        if self._cache is not None:
            self._cache.withdraw(live.block_hashes)

    def save_state(self, live: RequestState) -> int:
        """Copy the state of a request to a slot of its own, and return that; 0 if none is free."""
        if not self._free_slot(keep=0):
            return 0
        slot = self.slots.take()
        self.pools.copy(live.state_slot, slot)
        return slot

    def drop_saved(self, live: RequestState, slot: int, *, restore: bool) -> None:
        """Free a slot of `save_state`; with `restore` the request gets the state back first."""
        if restore:
            self.pools.copy(slot, live.state_slot)
        self.slots.give_back(slot)

    def _find(self, live: RequestState) -> PrefixHit:
        """What the cache has of a request; at least one token is left to be computed."""
        if self._cache is None or live.unknown_prompt_rows(0, live.num_prompt):
            return PrefixHit()
        most = (len(live.tokens) - 1) // self._block_size
        self._extend_hashes(live, most)
        return self._cache.find(live.block_hashes[:most])

    def _extend_hashes(self, live: RequestState, count: int) -> None:
        extend_hashes(live.block_hashes, live.tokens, block_size=self._block_size, count=count)

    def _begin_state(self, live: RequestState, hit: PrefixHit) -> bool:
        """Give a request its slot: zeros, or a copy of the snapshot."""
        if not self.pools.has_states:
            return True
        if not self._free_slot(keep=hit.snapshot):
            return False
        live.state_slot = self.slots.take()
        if hit.snapshot:
            self.pools.copy(hit.snapshot, live.state_slot)
        else:
            self.pools.zero(live.state_slot)
        return True

    def _free_slot(self, *, keep: int) -> bool:
        if self.slots.num_free:
            return True
        return self._cache is not None and self._cache.free_snapshot(keep=keep)

    def _plan_snapshots(self, live: RequestState, hit: PrefixHit) -> None:
        """Decide after which tokens of a prompt the state is copied: where requests part, and late.

        A snapshot is useful where other requests begin from it: behind what two of them have in
        common, and near the end of a prompt that comes again with more behind it.
        """
        live.num_published = len(hit.blocks)
        live.is_orphan = False
        live.snapshot_at = []
        if self._cache is not None and self.pools.has_states:
            multiple = self._snapshot_multiple
            wanted = {hit.num_known, len(live.tokens) - 1}
            aligned = {number - number % multiple for number in wanted}
            live.snapshot_at = sorted(number for number in aligned if number > hit.num_tokens)
            if not live.snapshot_at:
                interval = self._snapshot_interval
                live.snapshot_at = [(hit.num_tokens // interval + 1) * interval]
        self._set_note_at(live)

    def _note_in_flight(self, live: RequestState) -> None:
        """Note what others can begin from soon: blocks, or for states what is behind a snapshot."""
        first = live.num_computed // self._block_size
        stop = (len(live.tokens) - 1) // self._block_size
        if self._cache is None or len(live.block_hashes) < stop:
            return
        ends = list(range(first + 1, stop + 1))
        if self.pools.has_states:
            at = [number // self._block_size for number in live.snapshot_at]
            ends = [end for end in at if end <= stop]
        live.in_flight_until = ends[-1] * self._block_size if ends else 0
        for end in ends:
            digest = live.block_hashes[end - 1]
            if digest not in self._in_flight:
                self._in_flight[digest] = end - first
                live.in_flight_prefix.append(digest)
            first = end

    def _end_in_flight(self, live: RequestState) -> None:
        for digest in live.in_flight_prefix:
            del self._in_flight[digest]
        live.in_flight_prefix.clear()

    def _set_note_at(self, live: RequestState) -> None:
        live.note_at = live.snapshot_at[0] if live.snapshot_at else NEVER
        if self._cache is not None and self.pools.has_blocks and not live.is_orphan:
            live.note_at = min(live.note_at, (live.num_published + 1) * self._block_size)
        if self._window < NEVER:
            unseen_at = (live.num_given_back + 1) * self._block_size + self._window - 1
            live.note_at = min(live.note_at, unseen_at)

    def _cache_state(self, live: RequestState, cache: PrefixCache, count: int) -> None:
        """Copy the state behind the first `count` blocks for the cache, if there is a slot."""
        self._extend_hashes(live, count)
        hashes = live.block_hashes[:count]
        if live.is_orphan or not cache.wants_snapshot(hashes[-1]) or not self._free_slot(keep=0):
            return
        slot = self.slots.take()
        self.pools.copy(live.state_slot, slot)
        cache.publish_snapshot(hashes, slot)

    def _has_blocks(self, count: int) -> bool:
        return count <= self.blocks.num_free + self.blocks.num_cached

    def _make_free(self, count: int) -> None:
        missing = count - self.blocks.num_free
        if missing > 0 and self._cache is not None:
            self._cache.free_blocks(missing)

    def _reserve(self, count: int) -> tuple[int, int]:
        reservation, blocks = self.blocks.reserve(count), self.blocks
        if reservation[1] or self._cache is None or count * _POOL_OVER_RESERVATION > blocks.size:
            return reservation
        if blocks.num_free * _POOL_OVER_FREE < blocks.size:
            self._cache.free_blocks(min(count, blocks.num_cached))
            reservation = blocks.reserve(count)
        return reservation

    def _allocate(self, live: RequestState, count: int) -> None:
        last = live.blocks[-1] if live.blocks else 0
        self._append(live, self.blocks.allocate(count, after=last, reservation=live.reservation))

    def _append(self, live: RequestState, found: list[int]) -> None:
        if not found:
            return
        self.tables.write(live.table_row, len(live.blocks), found)
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
            if block and self.blocks.release(block) and self._cache is not None:
                self._cache.note_idle(block)

    def uses(self) -> tuple[PoolUse, PoolUse]:
        """What the places of both pools are used for: KV blocks, and state slots."""
        blocks, slots = (
            PoolUse(pool.size, pool.num_free, pool.num_used, pool.num_cached, each)
            for pool, each in (
                (self.blocks, self.pools.bytes_per_block),
                (self.slots, self.pools.bytes_per_slot),
            )
        )
        return blocks, slots

    def discard(self) -> None:
        """Free the pools whatever is half changed; no request may run after that."""
        self.blocks = BlockManager(self.blocks.size)
        self.slots = StateSlots(self.slots.size)
        self._cache = None
        self.pools.free()

    def close(self) -> None:
        """Forget what is cached and free the pools; no request may hold anything."""
        if self._cache is not None:
            self._cache.clear()
        self.pools.free()
