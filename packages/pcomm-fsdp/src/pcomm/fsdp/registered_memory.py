"""Buffers in memory that is registered with the communicator that sends them.

The memory that a model needs is planned before it has run, by integers only. Memory has to be there
when it is registered, and buffers come and go within it. All buffers of one arena therefore have
one size, so that a place that one leaves fits the next, and an arena has as many places as buffers
can live at once. Groups of parameters of different sizes share an arena, the smaller ones padded,
where that takes less memory than an arena for each.

No GPU has run it yet: it stays as simple as it is until one has.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.groups.group import Group
from pcomm.core.memory.pools import Arena, PoolRegistry
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.param_group import BufferPool, Fill
from pcomm.fsdp.runtime.peers import Peers
from pcomm.fsdp.settings import CommPolicy

__all__ = ["ArenaPlan", "PooledMemory", "plan_arenas", "register_memory"]


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


Use = Literal["gather", "reduce"]
"""Kind of buffers: of gathered parameters, or of unsharded gradients."""


@dataclass(frozen=True)
class ArenaPlan:
    """Memory for buffers of one use that are sent by one communicator.

    Args:
        name: Begins with the use, the group and the size.
        use: Kind of the buffers, of gathers or of reduces.
        group: The first group of the communicator.
        slot_bytes: Bytes of each buffer.
        num_slots: Number of buffers that can live at once.
        plans: Names of the parameter groups that have these buffers.
    """

    name: str
    use: Use
    group: Group
    slot_bytes: int
    num_slots: int
    plans: tuple[str, ...]


def plan_arenas(plans: Sequence[GroupPlan], comm: CommPolicy) -> list[ArenaPlan]:
    """The arenas of a model, in one order on all ranks. Local.

    Buffers that no communicator sends get none: those of one rank, and gathered parameters that
    are the shard itself.

    Args:
        plans: Plans of all parameter groups, with the groups that they use in the end.
        comm: Depths, which bound the buffers that live at once.
    """
    nested = _Nesting(plans)

    def num_gathered(own: Sequence[GroupPlan]) -> int:
        passing = [plan for plan in own if plan.reshard.keep == "use"]
        return _most_at_once(own, passing, nested, comm.most_prefetch)

    def num_gradients(own: Sequence[GroupPlan]) -> int:
        passing = [plan for plan in own if plan.reshard.reduce == "micro_batch"]
        return _most_at_once(own, passing, nested, comm.inflight_reduce)

    gathered = [p for p in plans if p.gather.process_group is not None and not p.is_one_buffer]
    reduced = [p for p in plans if p.reduce.process_group is not None and p.is_trainable]
    return [
        *_arenas("gather", [p for p in gathered if not p.is_local], num_gathered),
        *_arenas("reduce", [p for p in reduced if not p.is_local], num_gradients),
    ]


class _Nesting:
    """The units that are in use whenever another one is.

    Args:
        plans: Plans of all parameter groups; units without any are never gathered.
    """

    def __init__(self, plans: Sequence[GroupPlan]) -> None:
        units = dict.fromkeys([ROOT, *(plan.unit for plan in plans if not plan.is_local)])
        self._around = {
            unit: [
                other
                for other in units
                if other != unit and (other == ROOT or unit.startswith(f"{other}."))
            ]
            for unit in units
        }

    def most_around(self, own: Sequence[GroupPlan]) -> int:
        """The most of `own` that belong to the units around one unit."""
        counts = Counter(plan.unit for plan in own)
        return max(sum(counts[other] for other in around) for around in self._around.values())


def _most_at_once(
    own: Sequence[GroupPlan], passing: Sequence[GroupPlan], nested: _Nesting, more: int
) -> int:
    """An upper bound of how many of these parameter groups have a buffer at once. Local.

    Beside what stays, those of the units around one unit have one, and those of `more + 1` units.
    Gathered parameters: of the unit in use and of `prefetch` that are next. Gradients: of the unit
    that fills them and of `inflight_reduce` with reduces in flight.

    Args:
        own: Parameter groups.
        passing: Groups among `own` with buffers that go with their unit; all others stay.
        nested: Units of the whole model.
        more: Units beside the one in use.
    """
    by_unit = sorted(Counter(plan.unit for plan in passing).values(), reverse=True)
    most = nested.most_around(passing) + sum(by_unit[: more + 1])
    return len(own) - len(passing) + min(len(passing), most)


def _arenas(
    use: Use, plans: Sequence[GroupPlan], count: Callable[[Sequence[GroupPlan]], int]
) -> list[ArenaPlan]:
    by_communicator: dict[int, list[GroupPlan]] = {}
    for plan in plans:
        by_communicator.setdefault(id(_group(plan, use).process_group), []).append(plan)
    found = []
    for own in by_communicator.values():
        group = _group(own[0], use)
        for together in _size_classes(own, use, count):
            slot_bytes = max(_num_bytes(plan, use) for plan in together)
            names = tuple(plan.name for plan in together)
            name = f"fsdp {use} {group.key} {slot_bytes}"
            found.append(ArenaPlan(name, use, group, slot_bytes, count(together), names))
    return found


def _size_classes(
    plans: Sequence[GroupPlan], use: Use, count: Callable[[Sequence[GroupPlan]], int]
) -> list[list[GroupPlan]]:
    """Neighbours in size together, so that all arenas take the fewest bytes, then are the fewest.

    `best[i]` is the best for the `i` smallest sizes: its cost, and its last class.
    """
    by_size: dict[int, list[GroupPlan]] = {}
    for plan in plans:
        by_size.setdefault(_num_bytes(plan, use), []).append(plan)
    sizes = sorted(by_size)
    best: list[tuple[tuple[int, int], list[list[GroupPlan]]]] = [((0, 0), [])]
    for end in range(1, len(sizes) + 1):
        choices = []
        for begin in range(end):
            own = [plan for size in sizes[begin:end] for plan in by_size[size]]
            (num_bytes, num_classes), before = best[begin]
            cost = num_bytes + sizes[end - 1] * count(own), num_classes + 1
            choices.append((cost, [*before, own]))
        best.append(min(choices, key=lambda choice: choice[0]))
    return best[-1][1]


def _group(plan: GroupPlan, use: Use) -> Group:
    return plan.gather if use == "gather" else plan.reduce


def _num_bytes(plan: GroupPlan, use: Use) -> int:
    return plan.gathered_bytes if use == "gather" else plan.gradient_bytes
