"""An optimizer whose state has owners, on groups of the caller's, such as those of a forecast."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from pcomm.core import Group, Groups
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.ntp.planning.hosts import Hosts
from pcomm.ntp.planning.owners import Owners, holding_groups
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.survival import Survival
from pcomm.ntp.sync.grad_groups import group_names
from pcomm.ntp.sync.owned_params import OwnedParams, unit_sizes

__all__ = ["OwnedOptimizer"]


class OwnedOptimizer:
    """What a `Session` with `copies` does at the end of a step, for ranks that stay.

    A unit has the same owners as in a session of the same plan that begins.

    Args:
        plan: Plan of the job.
        groups: Its groups, those of `grad_groups` among them.
        rank: Global rank of this process.
        model: This rank's part of the model.
        optimizer: Optimizer that was made for its parameters; it gets the parts that this rank
            owns in their place.
        copies: Number of owners of each unit; None for the state on each rank that holds it.
        hosts: Host of each rank.

    Attributes:
        survival: What a session may lose of these ranks while all of its state is left.
        optimizer: The optimizer.

    Raises:
        ConfigError: Fewer than one copy, or an optimizer of other parameters.
    """

    def __init__(
        self,
        plan: NtpPlan,
        groups: Groups,
        rank: int,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        copies: int | None,
        hosts: Mapping[int, str],
    ) -> None:
        self.optimizer, self._groups = optimizer, groups
        self._names = group_names(plan, "interval")
        self._owned: OwnedParams | None = None
        layouts = param_layouts_of(model)
        sizes = unit_sizes(plan, model, optimizer, layouts)
        if copies is None:
            held = {own.key: own for own in sizes.values()}.values()
            holders = (ranks for own in held for *_, ranks in holding_groups(plan, rank, own))
            self.survival = Survival.of(holders, hosts)
        else:
            named = Hosts.of(plan.topology, copies, hosts)
            owners = Owners.deal(plan, rank, sizes, named)
            self.survival = owners.survival(named)
            self._owned = OwnedParams(plan, rank, model, optimizer, layouts, owners)

    def step(self) -> None:
        """One step of what this rank owns. Local."""
        if self._owned is None:
            self.optimizer.step()
        else:
            self._owned.step()

    def gather_weights(self) -> None:
        """Get the weights that other ranks own, and send this one's. Collective over a stage."""
        if self._owned is not None:
            self._owned.gather_weights(self._group)

    def _group(self, ranks: tuple[int, ...]) -> Group:
        return self._groups[self._names[ranks]]
