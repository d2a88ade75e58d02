"""Checks of what `open_groups` is asked for, made before the ranks agree on it. All are local."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.distributed as dist

from pcomm.core.control.control import Control
from pcomm.core.control.default import default_control
from pcomm.core.control.rank_sets import spelled
from pcomm.core.errors import TopologyError
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.process.unconnected_default import is_connected
from pcomm.core.topology import Topology

__all__ = ["callers_of", "check_callers", "wanted_groups"]


def wanted_groups(
    topology: Topology, specs: Sequence[str | tuple[str, str] | GroupSpec]
) -> list[GroupSpec]:
    """The groups to open, each under its one name and in `GroupSpec` form.

    Raises:
        TopologyError: Unknown axes, axes in another order, a group that is named twice, or one of
            explicit ranks that are not there, or with the name of axes.
    """
    wanted = [_normalised(topology, spec) for spec in specs]
    _check_distinct(wanted)
    return wanted


def callers_of(topology: Topology) -> Control:
    """The control of the ranks that open groups together, where the caller gives none."""
    if not is_connected():
        return Control(None, (topology.offset,), topology.offset)
    rank = dist.get_rank()
    # Without an offset every process of the job is meant, also where the sizes do not multiply to
    # their number: that is a mistake, and all of them have to hear of it.
    called: Sequence[int] = topology.ranks if topology.offset else range(dist.get_world_size())
    if topology.failed:
        called = [r for r in called if r not in topology.failed]
    if len(called) == 1 or rank not in called:
        return Control(None, (rank,), rank)
    return default_control(called)


def check_callers(topology: Topology, callers: Control, *, is_given: bool) -> None:
    """Make sure that the callers are the ranks of the topology, and that this is one of them.

    Args:
        topology: Axes and ranks of the groups.
        callers: Control of the ranks that open the groups.
        is_given: True if the caller gave that control, False if it comes from `callers_of`.

    Raises:
        TopologyError: They are other ranks.
    """
    connected = is_connected()
    has_rank = connected or (is_given and dist.is_available() and dist.is_initialized())
    size, rank = dist.get_world_size() if connected else 1, callers.rank
    alive = tuple(r for r in topology.ranks if r not in topology.failed)
    fix = (
        "Start as many processes as the sizes multiply to (torchrun, or --ranks), "
        "or change the sizes."
    )
    if is_given and alive != callers.ranks:
        found = f"a control of ranks {spelled(callers.ranks)}"
        fix = "Give control.among(...) of the ranks of this topology, or change its sizes."
    elif has_rank and rank != dist.get_rank():
        found = f"this is rank {dist.get_rank()} of torch.distributed, and {rank} of the control"
        fix = (
            "Make the control with the rank of torch.distributed. Where ranks are missing, so that "
            "its numbers are others, give the control a store of its own and do not initialise "
            "torch.distributed."
        )
    elif not is_given and connected and size != topology.world_size and topology.offset == 0:
        found = f"torch.distributed has {size} ranks"
        fix += " If only some of the processes open it: control=default_control(topology.ranks)."
    elif not is_given and not connected and topology.world_size > 1:
        found = "torch.distributed is not initialised, so there is one process"
    elif rank not in alive:
        found = f"this is rank {rank} of {size}"
    else:
        return
    raise TopologyError(
        f"open_groups: {topology.describe()}, ranks {topology.ranks[0]} to {topology.ranks[-1]}",
        found=found,
        why="Every rank of the topology is one process, and every process has a place in it.",
        fix=fix,
    )


def _normalised(topology: Topology, spec: str | tuple[str, str] | GroupSpec) -> GroupSpec:
    if isinstance(spec, str):
        spec = GroupSpec(spec)
    elif isinstance(spec, tuple):
        spec = GroupSpec(*spec)
    if spec.ranks is not None:
        _check_ranks(topology, spec.axes, spec.ranks)
        return spec
    canonical = topology.canonical_name(spec.axes)
    if canonical != spec.axes:
        raise TopologyError(
            f"open_groups: group {spec.axes!r}",
            found=f"order {topology.order}, in which it is {canonical!r}",
            why="A group has one name, its axes from the slowest to the fastest.",
            fix=f"Ask for {canonical!r}.",
        )
    return spec


def _check_ranks(topology: Topology, name: str, ranks: tuple[int, ...]) -> None:
    """Make sure that a group of explicit ranks has ranks that open it, and a name of its own."""
    alive = [r for r in topology.ranks if r not in topology.failed]
    outside = sorted(set(ranks).difference(alive))
    fix = "Give each rank once, and only ranks of the topology that have not failed."
    if not ranks:
        found = "no ranks"
    elif len(set(ranks)) < len(ranks):
        found = f"rank {next(a for a, b in pairwise(ranks) if a == b)} more than once"
    elif outside:
        found = f"ranks {spelled(outside)}, and the groups are opened by ranks {spelled(alive)}"
    elif not name or _is_axes(topology, name):
        found = "a name of axes" if name else "an empty name"
        fix = "Give it another name, such as 'segment0'."
    else:
        return
    raise TopologyError(
        f"open_groups: group {name!r} of ranks {spelled(ranks)}",
        found=found,
        why="Its ranks open it together with all others, and find it by its name.",
        fix=fix,
    )


def _is_axes(topology: Topology, name: str) -> bool:
    try:
        topology.canonical_name(name)
    except TopologyError:
        return False
    return True


def _check_distinct(specs: Sequence[GroupSpec]) -> None:
    seen: dict[tuple[str, str], GroupSpec] = {}
    for spec in specs:
        other = seen.setdefault((spec.axes, spec.role), spec)
        if other is not spec:
            raise TopologyError(
                f"open_groups: group {spec.axes!r} with role {spec.role!r}",
                found=f"asked for twice, with {other.options.asked} and {spec.options.asked}",
                why="Axes and role are the key under which a group is found.",
                fix="Remove one, or give it a role of its own.",
            )
