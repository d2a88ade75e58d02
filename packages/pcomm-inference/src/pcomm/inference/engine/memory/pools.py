"""The memory of all layers: pools of KV blocks and of state slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.inference.memory import KVMemory, LayerMemory, StateMemory
from pcomm.inference.model import KVSpec, LayerSpec, StateSpec

__all__ = ["Pools"]


class Pools:
    """Allocates what each layer keeps, and zeroes and copies states.

    The two kinds of memory have page sizes of their own: a block holds `block_size` tokens of all
    attention layers, a slot the states of all recurrent layers.

    Args:
        specs: Declarations of the model, one for each layer; `check_memory_specs` has passed.
        num_blocks: Number of KV blocks, and one more that belongs to no request.
        block_size: Tokens of a block.
        num_slots: Number of state slots, and one more that belongs to no request.
        device: Device of the model.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.has_blocks = any(isinstance(spec, KVSpec) for spec in specs)
        self.has_states = any(isinstance(spec, StateSpec) for spec in specs)
        # Layers with the same tensors share one `[layers, slots, ...]`, so that a slot of all of
        # them is zeroed or copied by one operation. Each layer's slice of it is contiguous.
        kinds: dict[tuple[str, tuple[int, ...], torch.dtype], list[int]] = defaultdict(list)
        memories: list[LayerMemory | None] = []
        for number, spec in enumerate(specs):
            memory: LayerMemory | None = None
            if isinstance(spec, KVSpec):
                paged = (num_blocks + 1, block_size, spec.heads, spec.head_dim)
                # Zeros: attention may multiply what lies behind the last token by 0.
                keys, values = (torch.zeros(paged, dtype=spec.dtype, device=device) for _ in "kv")
                memory = KVMemory(keys, values)
            elif isinstance(spec, StateSpec):
                memory = StateMemory({})
                for name, shape in spec.shapes.items():
                    kinds[name, tuple(shape), spec.dtypes[name]].append(number)
            memories.append(memory)
        self._states: list[Tensor] = []
        for (name, shape, dtype), layers in kinds.items():
            size = (len(layers), num_slots + 1, *shape)
            stack = torch.zeros(size, dtype=dtype, device=device)
            self._states.append(stack)
            for place, number in enumerate(layers):
                memory = memories[number]
                assert isinstance(memory, StateMemory)
                memory.pools[name] = stack[place]
        self.memories: Sequence[LayerMemory | None] = memories
        self.bytes_per_block = sum(
            2 * block_size * spec.heads * spec.head_dim * spec.dtype.itemsize
            for spec in specs
            if isinstance(spec, KVSpec)
        )
        self.bytes_per_slot = sum(s[:, 0].numel() * s.itemsize for s in self._states)

    def zero(self, slot: int) -> None:
        """Make a slot the state of a request that begins."""
        for stack in self._states:
            stack[:, slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy the states of one slot to another."""
        for stack in self._states:
            stack[:, target].copy_(stack[:, source])

    def free(self) -> None:
        """Drop all memory; nothing may be read or written after that."""
        self.memories = ()
        self._states.clear()
