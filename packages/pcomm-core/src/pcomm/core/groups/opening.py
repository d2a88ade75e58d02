"""What `open_groups` does on each rank: check the request, agree on it, connect, and hand over.

A wait for other ranks ends after the seconds of `open_groups`: in an agreement by its round, and
while a communicator connects by its store (`communicators`). Operations have the limit of `spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from pcomm.core import environment
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.control.agreement import agree_in_group
from pcomm.core.control.control import Control, format_ranks
from pcomm.core.control.without_control import default_control, is_connected
from pcomm.core.errors import ConfigError, PcommError, TopologyError
from pcomm.core.groups.communicators import new_communicator
from pcomm.core.groups.group import Closing, Group
from pcomm.core.groups.spec import Granted, GroupSpec, Rails, grant
from pcomm.core.topology import Topology

__all__ = [
    "Made",
    "agree_on_groups",
    "callers_of",
    "connected_groups",
    "with_own_collectives",
]


@dataclass(frozen=True)
class AgreedGroups:
    """Groups that all ranks have agreed to open.

    Attributes:
        topology: Topology of the ranks.
        callers: Control of the ranks that open them.
        name: Name of the agreement, new with each.
        wanted: Groups in the order of their creation, each with the options that are granted.
        wait_s: Seconds to wait for other ranks.
    """

    topology: Topology
    callers: Control
    name: str
    wanted: Sequence[tuple[GroupSpec, Granted]]
    wait_s: float


Made = dict[tuple[object, ...], dist.ProcessGroup]
"""Communicators by what groups that share one have in common, in the order of their creation."""


def agree_on_groups(
    topology: Topology,
    specs: Sequence[str | tuple[str, str] | GroupSpec],
    callers: Control,
    *,
    is_given: bool,
    backend: str,
    timeout_s: float | None,
) -> AgreedGroups:
    """Make sure that all ranks ask for the same groups and can open them. Collective.

    Args:
        topology: Axes, sizes and order, as for `open_groups`.
        specs: Groups as for `open_groups`.
        callers: Control of the ranks that open them.
        is_given: True if the caller of `open_groups` gave that control.
        backend: `"gloo"` or `"nccl"`, for groups that name none.
        timeout_s: Seconds to wait for other ranks; None for those of `callers`.

    Raises:
        PcommError: Those of `open_groups`.
    """
    error: PcommError | None = None
    wanted: list[GroupSpec] = []
    granted: list[Granted] = []
    wait_s = environment.TIMEOUT_S.default if timeout_s is None else timeout_s
    try:
        environment.check()
        wait_s = callers.wait_s(timeout_s)
        _check_callers(topology, callers, is_given=is_given)
        wanted = _wanted_groups(topology, specs)
        granted = [grant(spec.options, spec.backend or backend, group=spec.axes) for spec in wanted]
    except PcommError as problem:
        error = problem
    rails = Rails()
    lines = [f"topology {topology.describe()}", f"backend {backend}"]
    lines += [spec.describe(rails) for spec in wanted]
    name = callers.agree("open_groups", lines, error=error, timeout_s=wait_s)
    return AgreedGroups(topology, callers, name, list(zip(wanted, granted, strict=True)), wait_s)


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


def _check_callers(topology: Topology, callers: Control, *, is_given: bool) -> None:
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
        found = f"a control of ranks {format_ranks(callers.ranks)}"
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


def _wanted_groups(
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
        found = f"ranks {format_ranks(outside)}, and the groups are opened by ranks "
        found += format_ranks(alive)
    elif not name or _is_axes(topology, name):
        found = "a name of axes" if name else "an empty name"
        fix = "Give it another name, such as 'segment0'."
    else:
        return
    raise TopologyError(
        f"open_groups: group {name!r} of ranks {format_ranks(ranks)}",
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


def connected_groups(agreed: AgreedGroups, made: Made, closing: Closing) -> list[Group]:
    """The groups of this rank, connected. Collective: every rank that agreed calls it.

    Args:
        agreed: Groups to open.
        made: Mapping that gets each communicator as soon as it is made, also if a later one cannot
            be.
        closing: Calls before the groups close.

    Raises:
        RuntimeError: Torch's, if a communicator could not be made.
    """
    rank = agreed.callers.rank
    return [
        _connected(agreed, spec, granted, made, closing)
        for spec, granted in agreed.wanted
        if spec.ranks is None or rank in spec.ranks
    ]


def _connected(
    agreed: AgreedGroups, spec: GroupSpec, granted: Granted, made: Made, closing: Closing
) -> Group:
    """One group, whose communicator is found in `made` or added there."""
    rank = agreed.callers.rank
    members = agreed.topology.members(rank, spec.axes) if spec.ranks is None else spec.ranks
    control, asked = agreed.callers.among(members), spec.options.asked
    if len(members) == 1:
        return Group(
            spec.axes, members, None, role=spec.role, asked=asked, closing=closing, control=control
        )
    identity = (members, spec.role, spec.options, granted.backend)
    if identity not in made:
        # Only members create a group: at 100,000 ranks no rank can create all of them.
        key = f"{spec.axes}:{spec.role}"
        assert agreed.callers.store is not None
        made[identity] = new_communicator(
            f"{agreed.name}/{key}/{members[0]}",
            members,
            granted,
            store=agreed.callers.store,
            rank=rank,
            description=f"pcomm:{key}",
            connect_s=agreed.wait_s,
        )
    return Group(
        spec.axes,
        members,
        made[identity],
        role=spec.role,
        rank=members.index(rank),
        asked=asked,
        granted=granted.fields,
        refused=granted.refused,
        closing=closing,
        control=control,
    )


_TOPIC = "open_groups: collectives"


def with_own_collectives(
    opened: Sequence[Group], make: Callable[[Group], Collectives], *, timeout_s: float
) -> list[Group]:
    """The same groups, whose operations go through what `make` returns for each communicator.

    Collective: every rank calls it with its groups, in one order for all. A communicator is left
    out on all of its ranks where one of them has failed before, so `make` may be collective.

    Args:
        opened: Groups of this rank, in the order in which they were opened.
        make: Called with the first group of each communicator. A `close` of what it returns is
            called before the groups close.
        timeout_s: Seconds to wait for the other ranks of a communicator.

    Raises:
        Exception: What `make` raised for the first communicator on which it failed here.
        ConfigError: `make` returned something else than collectives of that group.
        PeerError: `make` failed on another rank of a communicator.
    """
    made: dict[dist.ProcessGroup, Collectives] = {}
    failure: Exception | None = None
    for group in opened:
        if group.process_group is None or group.process_group in made:
            continue
        made[group.process_group] = group.collectives
        try:
            agree_in_group(group, _TOPIC, [], error=failure, timeout_s=timeout_s)
            found = make(group)
            if found is group.collectives:
                continue
            close = getattr(found, "close", None)
            if close is not None:
                group.before_close(close)
            _check_own(group, found)
            made[group.process_group] = found
        except Exception as problem:
            failure = failure or problem
    if failure is not None:
        raise failure
    return [
        group
        if group.process_group is None or made[group.process_group] is group.collectives
        else group.with_collectives(made[group.process_group])
        for group in opened
    ]


def _check_own(group: Group, found: object) -> None:
    told = type(found).__name__
    if isinstance(found, Collectives):
        if (found.rank, found.size) == (group.rank, group.size):
            return
        told = f"rank {found.rank} of {found.size}"
    raise ConfigError(
        f"{_TOPIC} of group {group.key}",
        found=f"{told}, for rank {group.rank} of {group.size}",
        why="What `collectives` returns takes the place of the group's own operations.",
        fix="Return collectives of that group, such as `group.collectives` or some around them.",
    )
