"""Gives requests their blocks and their state slot, and takes them back."""

from __future__ import annotations

from pcomm.inference.engine.block_manager import BlockManager
from pcomm.inference.engine.block_tables import BlockTables
from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.pools import Pools
from pcomm.inference.engine.state_slots import StateSlots

__all__ = ["Allocator"]

_ANY_NUMBER = 1 << 60


class Allocator:
    """What scheduler and engine call when a request begins, grows, ends or is preempted.

    Args:
        pools: Memory of all layers; says which of the two kinds the model needs.
        blocks: Free and used blocks.
        slots: Free and used state slots.
        tables: Block tables of the running requests.
        block_size: Tokens of a block.
    """

    def __init__(
        self,
        pools: Pools,
        blocks: BlockManager,
        slots: StateSlots,
        tables: BlockTables,
        *,
        block_size: int,
    ) -> None:
        self._pools = pools
        self.blocks = blocks
        self.slots = slots
        self._tables = tables
        self._block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self._block_size) if self._pools.has_blocks else 0

    def admit(self, live: LiveRequest, *, headroom: int) -> bool:
        """Give a request that begins all blocks of its tokens, a zeroed slot and a table row.

        Args:
            live: Request that holds nothing.
            headroom: Number of blocks that have to remain for others.

        Returns:
            False if there is not enough; the request holds nothing then.
        """
        needed = self.blocks_for(len(live.tokens))
        if needed + (headroom if needed else 0) > self.blocks.num_free:
            return False
        if self._pools.has_states:
            if not self.slots.num_free:
                return False
            live.state_slot = self.slots.take()
            self._pools.zero(live.state_slot)
        live.table_row = self._tables.take_row()
        if self._pools.has_blocks:
            live.claim = self.blocks.claim(self.blocks_for(live.limit - 1))
            self._append(live, needed)
        else:
            live.capacity = _ANY_NUMBER
        return True

    def extend(self, live: LiveRequest, num_tokens: int) -> bool:
        """Give a request blocks for its first `num_tokens` tokens; False if there are too few."""
        missing = self.blocks_for(num_tokens) - len(live.blocks)
        if missing > self.blocks.num_free:
            return False
        self._append(live, missing)
        return True

    def release(self, live: LiveRequest) -> None:
        """Take everything back that a request holds; nothing happens if that is nothing."""
        # From the end, so that the first blocks of a prompt are given up last.
        for block in reversed(live.blocks):
            self.blocks.release(block)
        self.blocks.unclaim(live.claim)
        if live.table_row:
            self._tables.give_row_back(live.table_row, len(live.blocks))
        if live.state_slot:
            self.slots.give_back(live.state_slot)
        live.blocks.clear()
        live.claim = (0, 0)
        live.capacity = live.table_row = live.state_slot = live.num_computed = 0
        live.first_block = None

    def _append(self, live: LiveRequest, count: int) -> None:
        last = live.blocks[-1] if live.blocks else 0
        found = self.blocks.allocate(count, after=last, claim=live.claim)
        self._tables.write(live.table_row, len(live.blocks), found)
        if not live.blocks:
            live.first_block = found[0]
        for block in found:
            if last and block != last + 1:
                live.first_block = None
            last = block
        live.blocks += found
        live.capacity = len(live.blocks) * self._block_size
