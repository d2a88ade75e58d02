"""The most memory that a step holds, by kind of buffer, from its schedule alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pcomm.fsdp.group_plan import GroupPlan
from pcomm.fsdp.schedule import Schedule, Step

__all__ = ["KINDS", "PeakMemory", "peak_memory"]

KINDS = ("shards", "gathered", "gradients", "shard gradients")
"""Kinds of buffers: main weights; gathered parameters; whole gradients that are filled, on their
way, or kept for the next unit; gradients of the shards."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of buffers in a step.

    Args:
        by_kind: The most of each kind, at whatever time that is.
        at_once: The most of all kinds together.
    """

    by_kind: dict[str, int]
    at_once: int


def peak_memory(schedules: Sequence[Schedule], plans: Sequence[GroupPlan]) -> PeakMemory:
    """The most that one rank holds in a step that begins without gradients. Local.

    Not counted: activations, optimizer state, and what one operation needs while it runs, such as
    a shard in the format of the gather.

    Args:
        schedules: Of each micro-batch of the step, in order.
        plans: Of all parameter groups.
    """
    walk = _Walk(plans)
    for schedule in schedules:
        for step in schedule.steps:
            walk.take(step)
        walk.end()
    return PeakMemory(walk.most, walk.most_at_once)


@dataclass
class _Walk:
    """What is allocated after each step."""

    plans: Sequence[GroupPlan]
    gathered: dict[str, int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    deposits: dict[str, int] = field(default_factory=dict)
    free: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.most = dict.fromkeys(KINDS, 0)
        self.most_at_once = 0
        self._by_name = {plan.name: plan for plan in self.plans}
        self._shards = sum(_shard_bytes(plan) for plan in self.plans)
        for plan in self.plans:
            if plan.is_local and plan.is_trainable:
                self.deposits[plan.name] = _shard_bytes(plan)
        self._look()

    def take(self, step: Step) -> None:
        """Follow one step."""
        if step.kind == "use" and step.phase == "backward":
            for plan in self.plans:
                if plan.unit == step.name and plan.is_trainable and not plan.is_local:
                    self._fill(plan)
        elif not step.is_anchor:
            plan = self._by_name[step.name]
            if step.kind == "gather" and not _is_one_buffer(plan):
                self.gathered[plan.name] = plan.gathered_bytes
            elif step.kind == "release":
                self.gathered.pop(plan.name, None)
            elif step.kind == "reduce":
                self._fill(plan)
            elif step.kind == "finish":
                self._finish(plan)
        self._look()

    def end(self) -> None:
        """The micro-batch has ended."""
        self.free.clear()

    def _fill(self, plan: GroupPlan) -> None:
        if plan.name not in self.filled:
            buffer = _gradient(plan)
            if buffer in self.free:
                self.free.remove(buffer)
            self.filled[plan.name] = buffer[0]

    def _finish(self, plan: GroupPlan) -> None:
        del self.filled[plan.name]
        # Of one rank and one format, the whole gradient is that of the shard; and autograd's own
        # tensor is not kept for another unit.
        is_shard = plan.reduce.size == 1 and plan.reduce_dtype == plan.main_dtype
        if not is_shard and not plan.takes_gradient_over:
            self.free.append(_gradient(plan))
        self.deposits[plan.name] = _shard_bytes(plan)

    def _look(self) -> None:
        now = {
            "shards": self._shards,
            "gathered": sum(self.gathered.values()),
            "gradients": sum(self.filled.values()) + sum(size for size, _ in self.free),
            "shard gradients": sum(self.deposits.values()),
        }
        self.most = {kind: max(self.most[kind], now[kind]) for kind in KINDS}
        self.most_at_once = max(self.most_at_once, sum(now.values()))


def _shard_bytes(plan: GroupPlan) -> int:
    num_elements = plan.layout.num_elements if plan.is_local else plan.layout.share
    return num_elements * plan.main_dtype.itemsize


def _gradient(plan: GroupPlan) -> tuple[int, str]:
    return plan.layout.length * plan.reduce_dtype.itemsize, str(plan.reduce_dtype)


def _is_one_buffer(plan: GroupPlan) -> bool:
    return plan.gather.size == 1 and plan.param_dtype == plan.main_dtype
