"""Sizes of an engine, and the memory it gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from pcomm.core import Group
from pcomm.core.errors import ConfigError
from pcomm.inference import Engine, KVSpec, LayerSpec, StateSpec
from pcomm.inference.roofline import BandwidthMeter
from pcomm.integration.llm.foreign_model import LoadedForeign
from pcomm.integration.llm.loading import LoadedModel

__all__ = ["EngineOptions", "MemorySize", "agreed_bytes", "free_bytes", "memory_size", "rank_bytes"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits of an engine; the arguments of `LLM` of the same names."""

    max_model_len: int
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_requests: int = 64
    max_queued: int = 256
    prefix_cache: bool = True
    speculative_tokens: int = 0
    batch_invariant: bool = False

    def engine(
        self,
        loaded: LoadedModel | LoadedForeign,
        budget_bytes: int,
        group: Group | None = None,
    ) -> Engine:
        """An engine for a model, or for this rank's part of one, with its graphs. Collective.

        Args:
            loaded: The model and its tokenizer.
            budget_bytes: Bytes for keys, values and states on this rank; the same on all ranks of
                a group, whose engines plan the same steps.
            group: Group that shares the model; None for a whole one.

        Raises:
            ConfigError: The budget has no room for one request, or an option cannot be used.
        """
        size = memory_size(
            loaded.model.memory_specs(),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_requests=self.max_requests,
            budget_bytes=budget_bytes,
        )
        # Before the pools are there. Ranks on one machine share its memory, and measure together.
        meter = BandwidthMeter()
        meter.bandwidth(loaded.model.device, loaded.model.step_weights().largest)
        engine = Engine(
            loaded.model,
            vocabulary=loaded.vocabulary,
            tokenizer=loaded.tokenizer,
            num_blocks=size.num_blocks,
            num_state_slots=size.num_state_slots,
            device=loaded.model.device,
            meter=meter,
            group=group,
            # The rest has the same names there.
            **vars(self),
        )
        engine.record_graphs()
        return engine


@dataclass(frozen=True)
class MemorySize:
    """Sizes of the two pools of an engine.

    Attributes:
        num_blocks: Number of KV blocks; at least 1.
        num_state_slots: Number of state slots; at least 1.
        bytes: Bytes that both take in all layers.
    """

    num_blocks: int
    num_state_slots: int
    bytes: int


def memory_size(
    specs: Sequence[LayerSpec],
    *,
    block_size: int,
    max_model_len: int,
    max_requests: int,
    budget_bytes: int,
) -> MemorySize:
    """The largest pools within a budget that requests could use. Local.

    Slots come first, two for each request: its state, and a snapshot for the prefix cache. They
    take at most half of the budget where there are keys and values, too.

    Args:
        specs: Memory that each layer keeps of a request.
        block_size: Tokens of a KV block.
        max_model_len: Most tokens of a request.
        max_requests: Most requests that run at once.
        budget_bytes: Bytes for both pools.

    Raises:
        ConfigError: The budget has no room for one request of `max_model_len` tokens; the message
            says which length has room.
    """
    block = sum(
        block_size * spec.heads * (spec.head_dim + spec.width_of_values) * spec.dtype.itemsize
        for spec in specs
        if isinstance(spec, KVSpec)
    )
    slot = sum(
        prod(shape) * spec.dtypes[name].itemsize
        for spec in specs
        if isinstance(spec, StateSpec)
        for name, shape in spec.shapes.items()
    )
    blocks_each = -(-max_model_len // block_size) if block else 0
    least = blocks_each * block + slot
    if least > budget_bytes:
        fitting = (budget_bytes - slot) // block * block_size if block else 0
        # A token of the prompt, and one that follows it.
        has_fitting = fitting >= 2
        smaller = f"Give a max_model_len (--max-model-len) of at most {fitting}, or"
        raise ConfigError(
            f"LLM: memory for requests of {max_model_len} tokens",
            found=f"{budget_bytes:,} bytes, and one such request takes {least:,}",
            why="Keys, values and states of a request are in memory together.",
            fix=f"{smaller if has_fitting else 'No length fits. Give'} memory_bytes of at least "
            f"{least:,} (--memory-mib {-(-least // 2**20)}), times the number of ranks.",
        )
    slots = 1
    if slot:
        left = budget_bytes - blocks_each * block
        for_slots = min(left, budget_bytes // 2) if block else left
        slots = min(2 * max_requests, max(for_slots // slot, 1))
    blocks = 1
    if block:
        blocks = (budget_bytes - slots * slot) // block
        blocks = min(blocks, max_requests * blocks_each)
    return MemorySize(blocks, slots, blocks * block + slots * slot)


_HOST_SHARE, _DEVICE_SHARE = 0.25, 0.8


def free_bytes(device: torch.device) -> int:
    """Bytes that an engine takes where nothing is said: a share of what is free now. Local.

    A quarter of the free memory of a host, which other programs need, too, and four fifths of that
    of a GPU.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _HOST_SHARE)


def agreed_bytes(device: torch.device, memory_bytes: int | None, group: Group | None) -> int:
    """Bytes for requests on this rank, the same on all ranks of a group. Collective over it.

    Args:
        device: Device of the model.
        memory_bytes: Bytes on all ranks together; None for a share of what is free.
        group: Ranks that share the model; None for this process alone.
    """
    free = free_bytes(device)
    if group is None:
        return rank_bytes(device, memory_bytes, free, ranks=1)
    mine = torch.tensor([free], device=device)
    least = int(group.collectives.all_gather(mine).min())
    return rank_bytes(device, memory_bytes, least, ranks=group.size)


def rank_bytes(device: torch.device, memory_bytes: int | None, free: int, *, ranks: int) -> int:
    """Bytes for requests on each of the ranks that share a model. Local.

    Args:
        device: Device of the model. Ranks on CPUs may all be on one host, and share what is free.
        memory_bytes: Bytes on all ranks together; None for what is free.
        free: Least `free_bytes` of all ranks.
        ranks: Number of ranks.
    """
    if memory_bytes is not None:
        return memory_bytes // ranks
    return free if device.type == "cuda" else free // ranks
