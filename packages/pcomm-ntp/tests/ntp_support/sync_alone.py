"""A `GradSync` of one rank, whose groups are the identity, for what needs no other rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from pcomm.core.control.control import Control
from pcomm.core.groups.group import Closing, Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.topology import Topology
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.sync.grad_groups import grad_groups
from pcomm.ntp.sync.grad_sync import GradSync

__all__ = ["plan_alone", "sync_alone"]


def plan_alone() -> tuple[NtpPlan, Groups]:
    """A plan of one rank with units `w`, and its groups."""
    made = plan(Topology({"dp": 1, "tp": 1}), Failures(), {"w": Units.columns(2)})
    control, closing = Control(None, (0,), 0), Closing()
    groups = [
        Group(spec.axes, (0,), None, closing=closing, control=control) for spec in grad_groups(made)
    ]
    return made, Groups(groups, closing=closing, control=control)


def sync_alone(model: nn.Module, **options: Any) -> GradSync:
    """The sums of a model that is on one rank alone.

    Args:
        model: The model.
        options: Other arguments of `GradSync`.
    """
    made, groups = plan_alone()
    return GradSync(made, model, groups, rank=0, **options)
