"""The pools of an engine, with all that gives their places to requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.inference.engine.engine_settings import EngineSettings
from pcomm.inference.engine.engine_stats import PoolUse
from pcomm.inference.engine.memory.allocator import Allocator
from pcomm.inference.engine.memory.block_manager import BlockManager
from pcomm.inference.engine.memory.pools import Pools
from pcomm.inference.engine.memory.prefix_cache import PrefixCache
from pcomm.inference.engine.memory.state_slots import StateSlots
from pcomm.inference.engine.runner.block_tables import BlockTables
from pcomm.inference.model import LayerSpec

__all__ = ["SNAPSHOT_INTERVAL", "STATE_CHUNK", "EngineMemory"]

STATE_CHUNK = 64
"""Tokens that kernels of recurrent layers compute at once. Chunks of a prompt, and the snapshots of
the prefix cache, end at multiples of it, so that a prompt that is cut is computed like a whole one.
"""

SNAPSHOT_INTERVAL = 256
"""Tokens between two snapshots while text is written, so that the next turn of a chat begins from
its middle; a copy for so many steps costs less than 1 % of what they move."""


class EngineMemory:
    """Allocates the pools that a model declares.

    Args:
        specs: Declarations of the model, one for each layer.
        settings: Sizes of the pools.
        prefix_cache: True to keep what ended requests have computed.
        device: Device of the model.

    Attributes:
        pools: Tensors of all layers.
        tables: Block tables of the running requests.
        allocator: Gives places to requests.
        chunk_multiple: Number of tokens; chunks of prompts end at multiples of it.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        settings: EngineSettings,
        *,
        prefix_cache: bool,
        device: torch.device,
    ) -> None:
        size = settings.block_size
        self.pools = Pools(
            specs,
            num_blocks=settings.num_blocks,
            block_size=size,
            num_slots=settings.num_state_slots,
            device=device,
        )
        has_blocks, has_states = self.pools.has_blocks, self.pools.has_states
        # The last token of a request is never computed.
        width = -(-(settings.max_model_len - 1) // size) if has_blocks else 0
        self.tables = BlockTables(settings.max_requests, width, device)
        self._blocks = BlockManager(settings.num_blocks if has_blocks else 0)
        self._slots = StateSlots(settings.num_state_slots if has_states else 0)
        self._cache: PrefixCache | None = None
        if prefix_cache and (has_blocks or has_states):
            self._cache = PrefixCache(
                self._blocks,
                self._slots,
                block_size=size,
                bytes_per_block=self.pools.bytes_per_block,
                bytes_per_slot=self.pools.bytes_per_slot,
            )
        multiple = -(-STATE_CHUNK // size) * size
        self.chunk_multiple = multiple if has_states else 1
        self.allocator = Allocator(
            self.pools,
            self._blocks,
            self._slots,
            self.tables,
            self._cache,
            block_size=size,
            snapshot_multiple=multiple,
            snapshot_interval=-(-SNAPSHOT_INTERVAL // multiple) * multiple,
        )

    def uses(self) -> tuple[PoolUse, PoolUse]:
        """What the places of both pools are used for: KV blocks, and state slots."""
        blocks, slots, pools = self._blocks, self._slots, self.pools
        return (
            PoolUse(
                blocks.num_blocks,
                blocks.num_free,
                blocks.num_used,
                blocks.num_cached,
                pools.bytes_per_block,
            ),
            PoolUse(
                slots.num_slots,
                slots.num_free,
                slots.num_used,
                slots.num_cached,
                pools.bytes_per_slot,
            ),
        )

    def discard(self) -> None:
        """Free the pools whatever is half changed; no request may run after that."""
        self._blocks = BlockManager(self._blocks.num_blocks)
        self._slots = StateSlots(self._slots.num_slots)
        self._cache = None
        self.pools.free()

    def close(self) -> None:
        """Forget what is cached and free the pools; no request may hold anything."""
        if self._cache is not None:
            self._cache.clear()
        self.pools.free()
