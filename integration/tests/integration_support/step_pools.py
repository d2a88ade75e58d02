"""Memory for the steps of a model without an engine: for tests of `LanguageModel.step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pcomm.inference import KVMemory, KVSpec, LayerMemory, StateMemory, StepBatch
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["StepPools"]

_BLOCK = 4


class StepPools:
    """Pools of a model for a few requests, whose blocks and slots lie in no order.

    What belongs to no request is not a number, so that a layer that reads it is found.

    Args:
        model: Model whose steps are computed.
        num_requests: Number of requests, which are named 0 and so on.
        max_tokens: Most tokens of a request.

    Attributes:
        lengths: Number of tokens of each request that are in memory.
        memory: Pools of each block of the model.
        blocks: KV blocks of each request.
        slots: State slot of each request.
    """

    def __init__(self, model: LanguageModel, num_requests: int, max_tokens: int) -> None:
        self._model = model
        blocks_each = -(-max_tokens // _BLOCK)
        generator = torch.Generator().manual_seed(7)
        blocks = 1 + torch.randperm(num_requests * blocks_each, generator=generator)
        self.blocks = blocks.view(num_requests, blocks_each)
        self.slots = 1 + torch.randperm(num_requests, generator=generator)
        self.lengths = [0] * num_requests
        self.memory = [
            self._pool(spec, num_requests, num_requests * blocks_each)
            for spec in model.memory_specs()
        ]

    def step(self, new: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Logits `[tokens, V]` of the new tokens of each request, all in one step."""
        order = sorted(new, key=lambda n: (len(new[n]) != 1 or not self.lengths[n], n))
        batch = self.batch(order, new)
        logits = self._model.step(batch, self.memory)
        for request in order:
            self.lengths[request] += len(new[request])
        sizes = [len(new[request]) for request in order]
        return dict(zip(order, logits.split(sizes), strict=True))

    def forget(self, request: int) -> None:
        """Make a request begin anew, with zeros for its states."""
        self.lengths[request] = 0
        for memory in self.memory:
            if isinstance(memory, StateMemory):
                for pool in memory.pools.values():
                    pool[self.slots[request]] = 0

    def batch(self, order: Sequence[int], new: Mapping[int, Sequence[int]]) -> StepBatch:
        """The batch of the new tokens of these requests, all of whose logits are wanted."""
        contexts = [self.lengths[request] for request in order]
        offsets, positions, slots = [0], list[Tensor](), list[Tensor]()
        for request, context in zip(order, contexts, strict=True):
            count = len(new[request])
            offsets.append(offsets[-1] + count)
            positions.append(torch.arange(context, context + count))
            blocks = self.blocks[request][positions[-1] // _BLOCK]
            slots.append(blocks * _BLOCK + positions[-1] % _BLOCK)
        tokens = [token for request in order for token in new[request]]
        return StepBatch(
            tokens_T=torch.tensor(tokens),
            positions_T=torch.cat(positions),
            cu_seqlens=tuple(offsets),
            cu_seqlens_N1=torch.tensor(offsets, dtype=torch.int32),
            context_lens=tuple(contexts),
            context_lens_N=torch.tensor(contexts, dtype=torch.int32),
            block_tables_NB=self.blocks[order].to(torch.int32),
            slot_mapping_T=torch.cat(slots),
            first_blocks=(None,) * len(order),
            state_slots_N=self.slots[order],
            logits_rows=torch.arange(len(tokens)),
        )

    def _pool(self, spec: object, num_requests: int, num_blocks: int) -> LayerMemory:
        if isinstance(spec, KVSpec):
            shape = (num_blocks + 1, _BLOCK, spec.heads, spec.head_dim)
            keys, values = (torch.full(shape, torch.nan, dtype=spec.dtype) for _ in range(2))
            return KVMemory(keys, values)
        pools = {}
        for name, shape in spec.shapes.items():  # type: ignore[attr-defined]
            dtype = spec.dtypes[name]  # type: ignore[attr-defined]
            pools[name] = torch.full((num_requests + 1, *shape), torch.nan, dtype=dtype)
            # A request begins with zeros.
            pools[name][1:] = 0
        return StateMemory(pools)
