"""The registered memory that a model needs, before it has run: integers only.

Memory has to be there when it is registered, and buffers come and go within it. All buffers of one
arena therefore have one size, so that a place that one leaves fits the next, and an arena has as
many places as buffers can live at once. Groups of parameters of different sizes share an arena, the
smaller ones padded, where that takes less memory than an arena for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pcomm.core.groups.group import Group
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.settings.policy import CommPolicy

__all__ = ["ArenaPlan", "Nesting", "most_at_once", "plan_arenas"]

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
    nested = Nesting(plans)

    def num_gathered(own: Sequence[GroupPlan]) -> int:
        passing = [plan for plan in own if plan.reshard.keep == "use"]
        return most_at_once(own, passing, nested, comm.most_prefetch)

    def num_gradients(own: Sequence[GroupPlan]) -> int:
        passing = [plan for plan in own if plan.reshard.reduce == "micro_batch"]
        return most_at_once(own, passing, nested, comm.inflight_reduce)

    gathered = [p for p in plans if p.gather.process_group is not None and not p.is_one_buffer]
    reduced = [p for p in plans if p.reduce.process_group is not None and p.is_trainable]
    return [
        *_arenas("gather", [p for p in gathered if not p.is_local], num_gathered),
        *_arenas("reduce", [p for p in reduced if not p.is_local], num_gradients),
    ]


class Nesting:
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


def most_at_once(
    own: Sequence[GroupPlan], passing: Sequence[GroupPlan], nested: Nesting, more: int
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
