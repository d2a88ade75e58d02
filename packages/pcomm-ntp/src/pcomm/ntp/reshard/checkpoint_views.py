"""Checkpoints in logical order: saved under one plan, read under any other, or without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.reshard.planned_moves import units_of
from pcomm.ntp.reshard.state import parameter_name

__all__ = ["shard_views"]


@dataclass(frozen=True)
class _ReadView(ShardView):
    """A view of a shard that another replica saves."""

    def clone(self) -> ShardView:
        """This view: a copy for a later save is not needed."""
        return self

    def write_items(self, name: str) -> list[WriteItem]:
        """Nothing."""
        return []


def shard_views(
    plan: Plan, rank: int, tensors: Mapping[str, Tensor], param_layouts: Mapping[str, ParamLayout]
) -> dict[str, ShardView]:
    """Views for `ShardSavePlanner` and `ShardLoadPlanner`, at logical offsets. Local.

    The canonical replica of each stage saves, at the first place of the other axes, and all ranks
    read; so a checkpoint has every element once, and which ranks had failed is not visible in it.
    All ranks of a process group call `dcp.save` and `dcp.load` with it as `process_group`, such as
    that of the group `ntp.all`. Without one DCP takes the default group: then idle ranks call it,
    too, with the empty mapping that they get, and torch.distributed has to be initialised.

    Args:
        plan: Plan that is in force.
        rank: Global rank of this process.
        tensors: State tensors of this rank by name, as `state_tensors` names them.
        param_layouts: Layouts of the parameters of this rank's model; the dimension is taken from
            them, and the layout from the plan.

    Raises:
        ConfigError: A name of another form.
        LayoutError: A tensor that is not this rank's shard; when it is saved or loaded.
    """
    place = plan.place(rank)
    if place.is_idle:
        return {}
    coordinates = plan.topology.coordinates(rank)
    inner = [n for axis, n in coordinates.items() if axis not in ("tp", "dp", "pp")]
    is_saved = place.replica == plan.canonical_replica(place.stage) and not any(inner)
    kind = ShardView if is_saved else _ReadView
    views: dict[str, ShardView] = {}
    for name, tensor in tensors.items():
        parameter = parameter_name(name)
        if units_of(plan, parameter) is None:
            views[name] = kind(tensor, ParamLayout(), 0)
            continue
        layout = plan.layout(parameter, place.replica, place.stage)
        dim = param_layouts.get(parameter, ParamLayout()).dim
        views[name] = kind(tensor, ParamLayout(layout, dim), place.index)
    return views
