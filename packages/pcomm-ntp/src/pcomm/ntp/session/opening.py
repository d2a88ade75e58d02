"""The groups of one generation: opened together, left together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pcomm.core import Groups, GroupSpec, open_groups
from pcomm.core.control import Control
from pcomm.core.groups.options import CommOptions
from pcomm.core.topology import Topology
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.session.suspicion import suspecting
from pcomm.ntp.sync.grad_groups import Strategy, grad_groups

__all__ = ["EVERYONE", "Opened", "open_generation"]

EVERYONE = "session.all"
"""Name of the group of all ranks of a generation, idle ones included."""

Spec = str | tuple[str, str] | GroupSpec


@dataclass(frozen=True)
class Opened:
    """Groups of a generation whose operations a failure interrupts.

    Args:
        groups: Groups of the ranks that the plan uses; on an idle rank those of all ranks.
        every: The group of all ranks, which shares a communicator where no rank is idle.
    """

    groups: Groups
    every: Groups

    def abandon(self) -> None:
        """Leave all groups as they are. Local."""
        if self.groups is not self.every:
            self.groups.abandon()
        self.every.abandon()

    def close(self) -> None:
        """Close all groups. Collective."""
        if self.groups is not self.every:
            self.groups.close()
        self.every.close()


def open_generation(
    plan: Plan,
    control: Control,
    more: Sequence[Spec],
    strategy: Strategy,
    failure: Callable[[], str | None],
    *,
    backend: str,
    timeout_s: float,
) -> Opened:
    """Open the groups of a generation. Collective over its ranks.

    Args:
        plan: Plan of the generation.
        control: Control of its ranks.
        more: Groups of the caller, beside `tp` and those that sum gradients.
        strategy: Strategy by which gradients are summed.
        failure: Function that returns why the ranks leave the generation, or None.
        backend: `"gloo"` or `"nccl"`.
        timeout_s: Seconds after which an operation between ranks ends by itself.
    """
    used = [rank for rank in control.ranks if rank not in plan.idle_ranks]
    own = [_timed(spec, timeout_s) for spec in ("tp", *more, *grad_groups(plan, strategy))]
    all_ranks = _timed(GroupSpec.of_ranks(control.ranks, EVERYONE), timeout_s)
    first = [all_ranks, *own] if len(used) == len(control.ranks) else [all_ranks]
    every = _opened(plan.topology, first, control, failure, backend)
    if len(used) == len(control.ranks) or control.rank not in used:
        return Opened(every, every)
    try:
        topology = plan.topology.with_failed(plan.idle_ranks)
        return Opened(_opened(topology, own, control.among(used), failure, backend), every)
    except BaseException:
        every.abandon()
        raise


def _opened(
    topology: Topology,
    specs: Sequence[GroupSpec],
    control: Control,
    failure: Callable[[], str | None],
    backend: str,
) -> Groups:
    groups = open_groups(topology, specs, backend=backend, control=control)
    return groups.with_collectives(lambda group: suspecting(group.collectives, failure))


def _timed(spec: Spec, timeout_s: float) -> GroupSpec:
    """The specification of a group, with a limit on its operations."""
    if isinstance(spec, str):
        spec = GroupSpec(spec)
    elif isinstance(spec, tuple):
        spec = GroupSpec(*spec)
    options = spec.options or CommOptions()
    if options.timeout_s is not None:
        return spec
    return replace(spec, options=replace(options, timeout_s=timeout_s))
