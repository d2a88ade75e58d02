"""Groups that sum gradients, from the plan alone: the same list on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.groups.spec import GroupSpec
from pcomm.ntp.planning.plan import NtpPlan

__all__ = [
    "ALL",
    "Strategy",
    "TensorGroup",
    "all_tensor_groups",
    "core_group",
    "grad_groups",
    "group_names",
    "stage_group",
    "tensor_groups",
]

Strategy = Literal["interval", "gather-core"]

# The group of all used ranks.
ALL = "ntp.all"


@dataclass(frozen=True)
class TensorGroup:
    """One tensor-parallel group of a stage.

    Args:
        replica: Coordinate on `dp`.
        ranks: Global ranks in use, by their index in the group.
    """

    replica: int
    ranks: tuple[int, ...]


def grad_groups(plan: NtpPlan, strategy: Strategy = "interval") -> tuple[GroupSpec, ...]:
    """Groups that `GradSync` needs, to be given to `open_groups`. Local; no torch.

    `ntp.all` has all used ranks of the job. Others, `ntp.0` and so on, have the ranks that sum the
    same ranges of units, one group for each such set of ranks, whatever the number of parameters.
    With several pipeline stages `ntp.stage0` and so on have all used ranks of a stage. Idle ranks
    are in none of them; they call `open_groups` with the same list, as all ranks do.

    Args:
        plan: Plan of the job, equal on all ranks.
        strategy: Strategy that `GradSync` will be given.

    Raises:
        ConfigError: An unknown strategy.
    """
    return tuple(GroupSpec.of_ranks(ranks, n) for ranks, n in group_names(plan, strategy).items())


def group_names(plan: NtpPlan, strategy: Strategy) -> dict[tuple[int, ...], str]:
    """Name of the group of each set of ranks, in the order in which groups are opened. Local.

    Raises:
        ConfigError: An unknown strategy.
    """
    if strategy not in get_args(Strategy):
        raise ConfigError(
            f"grad_groups: strategy {strategy!r}",
            found=f"strategies {', '.join(get_args(Strategy))}",
            why="The strategy says which ranks sum which gradients.",
            fix=near_misses(str(strategy), get_args(Strategy)),
        )
    stages = all_tensor_groups(plan)
    used = [tuple(sorted(r for group in own for r in group.ranks)) for own in stages]
    names = {tuple(sorted(r for ranks in used for r in ranks)): ALL}
    for stage, ranks in enumerate(used):
        names.setdefault(ranks, f"ntp.stage{stage}")
    found = set()
    for own in stages:
        found |= set(_interval(plan, own) if strategy == "interval" else _gather_core(plan, own))
    for number, ranks in enumerate(sorted(found - set(names))):
        names[ranks] = f"ntp.{number}"
    return names


def stage_group(plan: NtpPlan, stage: int, strategy: Strategy) -> str:
    """Name of the group of all used ranks of a stage. Local."""
    ranks = tuple(sorted(r for group in tensor_groups(plan, stage) for r in group.ranks))
    return group_names(plan, strategy)[ranks]


def all_tensor_groups(plan: NtpPlan) -> list[list[TensorGroup]]:
    """The tensor-parallel groups of each stage, by their lowest rank. Local."""
    found: list[list[TensorGroup]] = [[] for _ in range(plan.topology.axes.get("pp", 1))]
    for alive in plan.topology.groups("tp"):
        place = plan.topology.coordinates(alive[0])
        ranks = plan.tensor_ranks(alive[0])
        if not ranks:  # what is left of a replica that is dropped
            continue
        found[place.get("pp", 0)].append(TensorGroup(place["dp"], ranks))
    return found


def tensor_groups(plan: NtpPlan, stage: int) -> list[TensorGroup]:
    """The tensor-parallel groups of a stage, by their lowest rank. Local."""
    return all_tensor_groups(plan)[stage]


def core_group(plan: NtpPlan, groups: list[TensorGroup], stage: int) -> TensorGroup:
    """The group whose layouts all others take on for a reduction: the first of least degree."""
    return min(groups, key=lambda group: plan.degree(group.replica, stage))


def _interval(plan: NtpPlan, groups: list[TensorGroup]) -> Iterator[tuple[int, ...]]:
    """Ranks that hold the same range of some units."""
    for name, units in plan.units:
        if units.is_split:
            yield from (one.ranks for one in plan.groups(name, groups[0].ranks[0]))


def _gather_core(plan: NtpPlan, groups: list[TensorGroup]) -> Iterator[tuple[int, ...]]:
    """Groups that exchange, and the ranks at each index that take part in reductions."""
    stage = plan.place(groups[0].ranks[0]).stage
    core = core_group(plan, groups, stage)
    form = plan.form(core.replica, stage)
    yield from (one.ranks for one in groups if plan.form(one.replica, stage) != form)
    for index in range(len(core.ranks)):
        yield tuple(sorted(one.ranks[index] for one in groups))
