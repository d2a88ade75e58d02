"""A whole model's state, and the shards of it that a rank has under a plan, cut apart by core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.tensor_parallel import ParamLayout, take_shard
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units

__all__ = ["LogicalState", "alive", "on_living_ranks", "state_units", "unset"]

# Data type of each kind of state: a low one with main parameters beside it, and one of 8 bytes.
_KINDS = {
    "model": torch.bfloat16,
    "optimizer.main": torch.float32,
    "optimizer.exp_avg": torch.float32,
    "optimizer.exp_avg_sq": torch.float64,
}


def state_units(count: int, *, width: int = 1) -> dict[str, Units]:
    """Units of every kind, by patterns.

    Args:
        count: Number of the largest units, which is the largest degree there can be.
        width: Positions of a unit where they can be chosen.
    """
    return {
        "*.qkv.*": Units.gqa(q=2 * count, kv=count, dim=width),
        "*.out.weight": Units.columns(2 * count * width, block=2 * width),
        "*.fc1.weight": Units.gated((count + 3) * width, block=width),
        "*.gdn.weight": Units.fused(count + 1, sections=(2 * width, 1, 3)),
        "embedding": Units.vocab(count + 4),
        "*.norm.weight": Units.replicated(),
    }


@dataclass(frozen=True, eq=False)
class LogicalState:
    """The tensors of a job as one process without parallelism would have them.

    Args:
        units: Units of the plans.
        wholes: Whole tensor by name, for each stage.
        dims: Dimension along which each split parameter is cut.
    """

    units: Mapping[str, Units]
    wholes: Mapping[int, Mapping[str, Tensor]]
    dims: Mapping[str, int]

    @classmethod
    def random(
        cls, units: Mapping[str, Units], *, stages: int = 1, hidden: int = 3, seed: int = 0
    ) -> LogicalState:
        """Random values, so that no element equals another one; equal in stages that share one.

        Args:
            units: Units of the plans, from `state_units`.
            stages: Number of pipeline stages.
            hidden: Length of dimensions that are not split.
            seed: Seed of the values.
        """
        generator, seen = torch.Generator().manual_seed(seed), dict[str, Tensor]()
        made: dict[int, dict[str, Tensor]] = {}
        dims: dict[str, int] = {}
        for stage in range(stages):
            shapes = _shapes(units, f"layers.{stage}", hidden)
            dims.update({name: dim for name, (_, dim) in shapes.items()})
            wanted = {
                f"{kind}.{name}": (shape, dtype)
                for name, (shape, _) in shapes.items()
                for kind, dtype in _KINDS.items()
            }
            wanted["model.angles"] = (7,), torch.float32
            wanted["model.count"] = (), torch.float32
            for name, (shape, dtype) in wanted.items():
                if name not in seen:
                    seen[name] = torch.randn(shape, generator=generator).to(dtype)
            made[stage] = {name: seen[name] for name in wanted}
        return cls(units, made, dims)

    def layouts(self, plan: NtpPlan, rank: int) -> dict[str, ParamLayout]:
        """What `param_layouts_of` says of a model that is built by the plan; none if idle."""
        place = plan.place(rank)
        found = {}
        for name in {} if place.is_idle else self.dims:
            known = plan.units_of(name)
            if known is None or not known[1].is_split:
                found[name] = ParamLayout()
            else:
                layout = plan.layout(name, place.replica, place.stage)
                found[name] = ParamLayout(layout, self.dims[name])
        return found

    def shards(self, plan: NtpPlan, rank: int) -> dict[str, Tensor]:
        """The state tensors of a rank; none if it is idle."""
        place = plan.place(rank)
        if place.is_idle:
            return {}
        layouts, found = self.layouts(plan, rank), {}
        for name, whole in self.wholes[place.stage].items():
            own = layouts.get(name.split(".", 1 if name.startswith("model") else 2)[-1])
            if own is None or own.layout is None:
                found[name] = whole.clone()
            else:
                found[name] = take_shard(whole, own.layout, place.index, dim=own.dim).clone()
        return found

    def arguments(
        self, old: NtpPlan, new: NtpPlan, group: Group, rank: int, holders: Collection[int]
    ) -> dict[str, Any]:
        """Arguments of `redistribute`; a rank that holds state has its shards of the old plan."""
        return {
            "old": old,
            "new": new,
            "group": group,
            "rank": rank,
            "source": self.shards(old, rank) if rank in holders else {},
            "target": unset(self.shards(new, rank)),
            "param_layouts": self.layouts(new, rank),
            "holders": holders,
        }


def alive(plan: NtpPlan) -> tuple[int, ...]:
    """All ranks that have not failed."""
    return tuple(rank for rank in plan.topology.ranks if rank not in plan.topology.failed)


def on_living_ranks(plan: NtpPlan, task: Callable[[int, Groups], Any]) -> dict[int, Any]:
    """What `task` returns on a thread for each rank that lives, with the group `all` of them."""
    return run_on_virtual_groups(plan.topology, [GroupSpec.of_ranks(alive(plan), "all")], task)


def unset(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes and types that hold NaN alone, to be filled."""
    return {name: torch.full_like(x, float("nan")) for name, x in tensors.items()}


def _shapes(
    units: Mapping[str, Units], prefix: str, hidden: int
) -> dict[str, tuple[tuple[int, ...], int]]:
    def length(pattern: str) -> int:
        own = units[pattern]
        return own.count * sum(own.sections)

    return {
        f"{prefix}.qkv.weight": ((length("*.qkv.*"), hidden), 0),
        f"{prefix}.qkv.bias": ((length("*.qkv.*"),), 0),
        f"{prefix}.out.weight": ((hidden, length("*.out.weight")), 1),
        f"{prefix}.fc1.weight": ((length("*.fc1.weight"), hidden), 0),
        f"{prefix}.gdn.weight": ((2, length("*.gdn.weight"), hidden), -2),
        "embedding": ((length("embedding"), hidden), 0),
        f"{prefix}.norm.weight": ((hidden,), 0),
    }
