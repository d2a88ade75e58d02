"""Buffers in memory that is registered with the communicator that sends them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.memory.pools.arena import Arena
from pcomm.core.memory.pools.registry import PoolRegistry
from pcomm.fsdp.memory.buffer_pool import BufferPool
from pcomm.fsdp.memory.pool_plan import ArenaPlan, plan_arenas
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.runtime.peers import Peers
from pcomm.fsdp.settings.policy import CommPolicy

__all__ = ["Fill", "PooledGradients", "PooledMemory", "register_memory"]

Fill = Callable[[torch.UntypedStorage, int], object]
"""Gives memory to a storage that has none: called with the storage and its number of bytes."""


class PooledMemory:
    """The arenas of one model, reserved and registered. Made by `register_memory`.

    Args:
        arenas: Each plan with its arena.

    Attributes:
        planned: The plans of all arenas.
    """

    def __init__(self, arenas: Sequence[tuple[ArenaPlan, Arena]]) -> None:
        self.planned = tuple(plan for plan, _ in arenas)
        self._arenas = {arena.name: arena for _, arena in arenas}
        self._names = {
            (plan.use, name): arena.name for plan, arena in arenas for name in plan.plans
        }

    def named_in(self, plan: GroupPlan) -> GroupPlan:
        """The plan with the names of its arenas."""
        return replace(
            plan,
            gather_pool=self._names.get(("gather", plan.name), ""),
            reduce_pool=self._names.get(("reduce", plan.name), ""),
        )

    def fill(self, plan: GroupPlan) -> Fill | None:
        """Gives memory to the unsharded parameters of a plan; None for ordinary memory."""
        if not plan.gather_pool:
            return None
        return functools.partial(_fill, self._arenas[plan.gather_pool])

    def gradients(self, plan: GroupPlan, device: torch.device) -> BufferPool | None:
        """The pool of a plan's gradient buffers; None for ordinary memory."""
        if not plan.reduce_pool:
            return None
        return PooledGradients(self._arenas[plan.reduce_pool], device)

    def describe(self) -> str:
        """One line for a report."""
        if not self.planned:
            return "registered memory: none, as no communicator sends a buffer"
        found = []
        for use, what in (("gather", "gathered parameters"), ("reduce", "gradients")):
            own = [plan for plan in self.planned if plan.use == use]
            for key in dict.fromkeys(plan.group.key for plan in own):
                sizes = " + ".join(
                    f"{plan.num_slots} x {plan.slot_bytes}" for plan in own if plan.group.key == key
                )
                found.append(f"{what} with {key}, {sizes} bytes")
        return f"registered memory: {'; '.join(found)}"


class PooledGradients(BufferPool):
    """Gradient buffers out of an arena, which reuses their memory.

    Args:
        arena: An arena with as many slots as buffers can live at once.
        device: Device of the arena.
    """

    def __init__(self, arena: Arena, device: torch.device) -> None:
        super().__init__(device)
        self._arena, self._where = arena, device

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer with any contents. Its memory goes back with it, or by `give` before that."""
        flat = torch.empty(0, dtype=dtype, device=self._where)
        storage = flat.untyped_storage()
        _fill(self._arena, storage, length * dtype.itemsize)
        return flat.set_(storage, 0, (length,), (1,))

    def give(self, buffer: Tensor) -> None:
        """Take the memory from a buffer that is not read any more, referenced or not."""
        buffer.untyped_storage().resize_(0)


def register_memory(
    registry: PoolRegistry,
    plans: Sequence[GroupPlan],
    comm: CommPolicy,
    peers: Peers,
    device: torch.device,
) -> PooledMemory:
    """Reserve memory for all buffers that are sent, and register it with their communicators.

    Collective over all groups and the registry's control group. Each communicator is used once
    before, since torch registers with none that is not initialised. If anything fails on one rank,
    what was registered here is undone on all.

    Args:
        registry: Registry of pools, which undoes the registration when the groups close.
        plans: Plans of all parameter groups, with the groups that they use in the end.
        comm: Depths of prefetch and of reduces, which bound the buffers that live at once.
        peers: All ranks of the groups.
        device: Device of the buffers.

    Raises:
        PcommError: An error of `PoolRegistry.bind`.
        RuntimeError: There is not enough memory.
        PeerError: One of these on another rank.
    """
    arenas: list[tuple[ArenaPlan, Arena]] = []
    error: Exception | None = None
    try:
        for plan in plan_arenas(plans, comm):
            arenas.append((plan, registry.new_arena(plan.group.role, plan.name)))
            arenas[-1][1].reserve(plan.num_slots, plan.slot_bytes, device)
    except Exception as problem:
        # Any error: the other ranks must not wait for this one.
        error = problem
    try:
        peers.agree("fully_shard: reserve memory", [plan.name for plan, _ in arenas], error=error)
        for group in {id(plan.group.process_group): plan.group for plan, _ in arenas}.values():
            group.collectives.all_reduce(torch.zeros(1, device=device))
        for plan, arena in arenas:
            registry.bind(arena, [plan.group])
    except Exception as problem:
        _undo(registry, [arena for _, arena in arenas], problem)
        raise
    return PooledMemory(arenas)


def _undo(registry: PoolRegistry, arenas: Sequence[Arena], problem: Exception) -> None:
    """Give everything back, on all ranks: what one has bound, the others have bound too."""
    bound = [binding.arena for binding in registry.bindings]
    for arena in reversed(arenas):
        try:
            if arena in bound:
                registry.unbind(arena)
            registry.drop(arena)
        except PcommError as other:
            problem.add_note(str(other))


def _fill(arena: Arena, storage: torch.UntypedStorage, num_bytes: int) -> None:
    try:
        arena.fill(storage, num_bytes)
    except ConfigError as problem:
        raise ConfigError(
            "fsdp: a buffer in registered memory",
            found=str(problem).splitlines()[0],
            why="Memory was reserved for units that are used one after another or inside each "
            "other. Here more of them are in use, as under one checkpoint of several units.",
            fix="ReshardPolicy(keep='backward', reduce='step') reserves for all units; or use no "
            "pools.",
        ) from problem
