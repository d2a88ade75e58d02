"""The most memory that a step holds, by kind of buffer, from its schedule alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pcomm.fsdp.memory.pool_plan import ArenaPlan
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.runtime.schedule import Schedule, Step

__all__ = ["KINDS", "PeakMemory", "peak_memory"]

KINDS = ("shards", "gathered", "gradients", "shard gradients")
"""Kinds of buffers: main weights; unsharded parameters; unsharded gradients that are filled, in
flight, or kept for the next unit; gradients of the shards."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of buffers in a step.

    Args:
        by_kind: The most of each kind, each at a time of its own.
        at_once: The most of all kinds together.
    """

    by_kind: dict[str, int]
    at_once: int


def peak_memory(
    schedules: Sequence[Schedule], plans: Sequence[GroupPlan], arenas: Sequence[ArenaPlan] = ()
) -> PeakMemory:
    """The most that one rank holds in a step that begins without gradients. Local.

    Registered memory is held all the time, whether buffers are in it or not.

    Not counted: activations, optimizer state, what an allocator rounds up, and what one operation
    needs while it runs, such as a shard in the format of the gather, or the sum of a micro-batch
    until it is added to the shard's gradient. A gradient that may be reduced as autograd made it is
    taken for one that is, although a few have to be copied.

    Args:
        schedules: The schedule of each micro-batch of the step, in order.
        plans: Plans of all parameter groups.
        arenas: Registered memory of these groups.
    """
    walk = _Walk(plans, arenas)
    for schedule in schedules:
        for step in schedule.steps:
            walk.take(step)
        walk.end()
    return PeakMemory(walk.most, walk.most_at_once)


@dataclass
class _Walk:
    """The buffers that are allocated after each step."""

    plans: Sequence[GroupPlan]
    arenas: Sequence[ArenaPlan]
    gathered: dict[str, int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    deposits: dict[str, int] = field(default_factory=dict)
    free: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.most = dict.fromkeys(KINDS, 0)
        self.most_at_once = 0
        self._by_name = {plan.name: plan for plan in self.plans}
        self._reserved = {"gather": 0, "reduce": 0}
        for arena in self.arenas:
            self._reserved[arena.use] += arena.num_slots * arena.slot_bytes
        self._in_arenas = {(arena.use, name) for arena in self.arenas for name in arena.plans}
        self._shards = sum(_shard_bytes(plan) for plan in self.plans)
        for plan in self.plans:
            if plan.is_local and plan.is_trainable:
                self.deposits[plan.name] = _shard_bytes(plan)
        self._count()

    def take(self, step: Step) -> None:
        """Follow one step."""
        if step.kind == "use" and step.phase == "backward":
            for plan in self.plans:
                if plan.unit == step.name and plan.is_trainable and not plan.is_local:
                    self._fill(plan)
        elif not step.is_anchor:
            plan = self._by_name[step.name]
            if step.kind == "gather" and not plan.is_one_buffer:
                is_reserved = ("gather", plan.name) in self._in_arenas
                self.gathered[plan.name] = 0 if is_reserved else plan.gathered_bytes
            elif step.kind == "release":
                self.gathered.pop(plan.name, None)
            elif step.kind == "reduce":
                self._fill(plan)
            elif step.kind == "wait_reduce":
                self._finish(plan)
        self._count()

    def end(self) -> None:
        """The micro-batch has ended."""
        self.free.clear()

    def _fill(self, plan: GroupPlan) -> None:
        if plan.name in self.filled:
            return
        buffer = plan.gradient_bytes, str(plan.reduce_dtype)
        if self._is_reused(plan) and buffer in self.free:
            self.free.remove(buffer)
        is_reserved = ("reduce", plan.name) in self._in_arenas
        self.filled[plan.name] = 0 if is_reserved else plan.gradient_bytes

    def _finish(self, plan: GroupPlan) -> None:
        del self.filled[plan.name]
        # With one rank and one format, the unsharded gradient is that of the shard.
        is_shard = plan.reduce.size == 1 and plan.reduce_dtype == plan.main_dtype
        if not is_shard and self._is_reused(plan):
            self.free.append((plan.gradient_bytes, str(plan.reduce_dtype)))
        self.deposits[plan.name] = _shard_bytes(plan)

    def _is_reused(self, plan: GroupPlan) -> bool:
        """True if the gradient's buffer serves other units too: autograd's own tensor does not."""
        return not plan.takes_gradient_over and ("reduce", plan.name) not in self._in_arenas

    def _count(self) -> None:
        now = {
            "shards": self._shards,
            "gathered": self._reserved["gather"] + sum(self.gathered.values()),
            "gradients": self._reserved["reduce"]
            + sum(self.filled.values())
            + sum(size for size, _ in self.free),
            "shard gradients": sum(self.deposits.values()),
        }
        self.most = {kind: max(self.most[kind], now[kind]) for kind in KINDS}
        self.most_at_once = max(self.most_at_once, sum(now.values()))


def _shard_bytes(plan: GroupPlan) -> int:
    num_elements = plan.layout.num_elements if plan.is_local else plan.layout.shard_length
    return num_elements * plan.main_dtype.itemsize
