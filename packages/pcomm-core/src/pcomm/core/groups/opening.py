"""The two steps in which ranks open groups: they agree on them, then members connect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pcomm.core.control.control import Control
from pcomm.core.errors import PcommError
from pcomm.core.groups.closing import Closing
from pcomm.core.groups.communicators import new_communicator
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_checks import check_callers, wanted_groups
from pcomm.core.groups.options import Granted, Rails, grant
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.process import environment
from pcomm.core.topology import Topology

__all__ = ["Agreed", "Made", "agree_on_groups", "connected_groups"]

Made = dict[tuple[object, ...], dist.ProcessGroup]
"""Communicators by what groups that share one have in common, in the order of their creation."""


@dataclass(frozen=True)
class Agreed:
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


def agree_on_groups(
    topology: Topology,
    specs: Sequence[str | tuple[str, str] | GroupSpec],
    callers: Control,
    *,
    is_given: bool,
    backend: str,
    timeout_s: float | None,
) -> Agreed:
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
        check_callers(topology, callers, is_given=is_given)
        wanted = wanted_groups(topology, specs)
        granted = [grant(spec.options, spec.backend or backend, group=spec.axes) for spec in wanted]
    except PcommError as problem:
        error = problem
    rails = Rails()
    lines = [f"topology {topology.describe()}", f"backend {backend}"]
    lines += [spec.describe(rails) for spec in wanted]
    name = callers.agree("open_groups", lines, error=error, timeout_s=wait_s)
    return Agreed(topology, callers, name, list(zip(wanted, granted, strict=True)), wait_s)


def connected_groups(agreed: Agreed, made: Made, closing: Closing) -> list[Group]:
    """The groups of this rank, connected. Collective: every rank that agreed calls it.

    Args:
        agreed: Groups to open.
        made: Gets each communicator as soon as it is made, also if a later one cannot be.
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
    agreed: Agreed, spec: GroupSpec, granted: Granted, made: Made, closing: Closing
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
