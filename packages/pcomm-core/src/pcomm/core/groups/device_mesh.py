"""Groups as torch's `DeviceMesh` and back, for code that takes one or the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.core.groups.communicators import new_communicator
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.groups.spec import CommOptions, grant
from pcomm.core.topology import Topology

__all__ = ["device_mesh", "groups_from_device_mesh"]


def device_mesh(
    groups: Groups, axes: Sequence[str | tuple[str, str]], *, device_type: str = "cpu"
) -> DeviceMesh:
    """A `DeviceMesh` whose dimensions are open groups and use their communicators. Local.

    It holds the ranks that differ from this one on `axes` only. A mesh wants a communicator for
    a dimension of size 1 as well, so one is made there; it is closed with the groups, and the
    mesh is not to be used after that.

    Args:
        groups: Groups of `open_groups`.
        axes: Keys of groups, of one view; they become the dimensions, outermost first, under
            their names (`"dp_cp"` for `("dp_cp", "gather")`).
        device_type: `"cpu"` or `"cuda"`.

    Raises:
        TopologyError: A group is not open, two groups share an axis or are of different views,
            or a rank of the mesh has failed.
        UnsupportedError: The groups were not opened from a topology.
        ConfigError: torch.distributed is not initialised, which a mesh needs for one rank too.
    """
    asked = f"device_mesh: axes {list(axes)}"
    chosen = [groups[key] for key in axes]
    if groups.topology is None:
        raise UnsupportedError(
            asked,
            found="groups made from process groups",
            why="A mesh holds the ranks of the other groups too, which only a topology knows.",
            fix="Open the groups with open_groups, or use DeviceMesh.from_group with these ranks.",
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            asked,
            found="torch.distributed is not initialised",
            why="A DeviceMesh asks the default process group for this process's rank.",
            fix="Call torch.distributed.init_process_group first, with world_size=1 if alone.",
        )
    mesh = _ranks(asked, groups.topology, chosen)
    communicators = [
        _alone(groups, group, device_type) if group.process_group is None else group.process_group
        for group in chosen
    ]
    return DeviceMesh.from_group(
        communicators, device_type, mesh, mesh_dim_names=tuple(group.name for group in chosen)
    )


def groups_from_device_mesh(mesh: DeviceMesh) -> Groups:
    """Groups around the communicators of every dimension of `mesh`, which are not closed by us.

    Local. Where a dimension spans the world, torch may have given it the default group.

    Raises:
        TopologyError: The dimensions have no names, or this rank is not in the mesh.
    """
    names = mesh.mesh_dim_names
    if names is None or mesh.get_coordinate() is None:
        raise TopologyError(
            f"groups_from_device_mesh: {mesh}",
            found="no mesh_dim_names" if names is None else f"this is rank {dist.get_rank()}",
            why="The groups of a rank are found under the names of the mesh's dimensions.",
            fix="Pass a mesh with mesh_dim_names, on the ranks that it holds.",
        )
    return Groups.from_process_groups({name: mesh.get_group(name) for name in names})


def _ranks(asked: str, topology: Topology, chosen: Sequence[Group]) -> torch.Tensor:
    """The ranks of the mesh around this one, one dimension a group."""
    views = {group.name.rpartition(".")[0] for group in chosen}
    if len(views) != 1:
        raise TopologyError(
            asked,
            found=f"the views {sorted(view or '(none)' for view in views)}",
            why="The dimensions of a mesh are digits of one factorisation of the ranks.",
            fix="Name one or more groups, all of the same view, and make one mesh a view.",
        )
    prefix = f"{view}." if (view := views.pop()) else ""
    joined = prefix + "_".join(group.name.removeprefix(prefix) for group in chosen)
    rank = dist.get_rank()
    present = topology.members(rank, joined)
    if len(present) != topology.group_size(joined):
        raise TopologyError(
            asked,
            found=f"{len(present)} of {topology.group_size(joined)} ranks, failed are "
            f"{sorted(topology.failed)}",
            why="A mesh is a full box of ranks and cannot have holes.",
            fix="Make the mesh over axes along which no rank has failed.",
        )
    # A step on one axis moves the rank by the same amount wherever the other axes stand.
    steps = ([member - rank for member in group.ranks] for group in chosen)
    ranks = [rank + sum(step) for step in itertools.product(*steps)]
    return torch.tensor(ranks, dtype=torch.int).view([group.size for group in chosen])


def _alone(groups: Groups, group: Group, device_type: str) -> dist.ProcessGroup:
    """A communicator of this rank alone, closed with `groups`."""
    key, rank = f"pcomm/alone/{group.ranks[0]}", group.ranks[0]
    store = distributed_c10d._get_default_store()
    number = store.add(key, 1)
    backend = dist.get_default_backend_for_device(device_type)
    granted = grant(CommOptions(), backend, group=group.key)
    description = f"pcomm:{group.name}:alone"
    name = f"{key}/{number}"
    made = new_communicator(name, [rank], granted, store=store, rank=rank, description=description)
    groups.own(made)
    return made
