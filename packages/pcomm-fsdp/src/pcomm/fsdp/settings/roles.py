"""The groups of a scope of parameters, named by what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.fsdp.settings.policy import Precision
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy

__all__ = ["Roles", "Scope", "roles_from"]


@dataclass(frozen=True)
class Roles:
    """The groups of one scope.

    Args:
        gather: Ranks that share each parameter, and the communicator that gathers them.
        reduce: The same ranks in the same order; its communicator reduces gradients. With one of
            its own, gathers and reduces do not queue behind each other.
        replicate: HSDP: ranks that hold the same shard, one of each `gather` group.
    """

    gather: Group
    reduce: Group
    replicate: Group | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.gather.size * (1 if self.replicate is None else self.replicate.size)


@dataclass(frozen=True)
class Scope:
    """Parameters with groups or number formats of their own, such as those of experts.

    Args:
        selects: Returns True for the name and the parameter of a parameter of this scope.
        roles: Its groups.
        divisor: Number that the summed gradient is divided by; None for that of the model. With
            expert parallelism that is right: an expert's gradient on one rank already holds the
            tokens of the whole expert-parallel group, so the sum over *its* replicas is that over
            all ranks.
        reshard: Time until which parameters and gradients stay unsharded; None for the model's.
        spread: Ranks that hold *other* parameters of this scope, such as the expert-parallel
            group; the norm of all gradients sums over them.
        precision: Number formats; None for those of the model. The inputs of units are cast, or
            not, as the model's say, since a unit may have parameters of several scopes.
    """

    selects: Callable[[str, nn.Parameter], bool]
    roles: Roles
    divisor: float | None = None
    reshard: ReshardPolicy | None = None
    spread: Group | None = None
    precision: Precision | None = None


def roles_from(given: Roles | DeviceMesh) -> Roles:
    """Roles as they are, or those that FSDP2 gives the dimensions of a mesh. Local.

    A mesh has one communicator a dimension, which then gathers and reduces. Of two dimensions the
    second one shards and the first one replicates.

    Raises:
        ConfigError: Something else, or a mesh of more dimensions.
    """
    if isinstance(given, Roles):
        return given
    if not isinstance(given, DeviceMesh):
        raise ConfigError(
            f"fully_shard: roles, {given!r:.80}",
            found=f"a {type(given).__name__}",
            why="Roles name the groups that gather parameters and reduce gradients.",
            fix='Pass Roles(gather=groups["dp", "gather"], reduce=groups["dp", "reduce"]), of '
            "groups that open_groups has opened, or a DeviceMesh.",
        )
    if given.ndim > 2:
        raise ConfigError(
            f"fully_shard: roles, {given}",
            found=f"a mesh of {given.ndim} dimensions",
            why="One dimension shards, and a second one replicates.",
            fix="Pass a part of the mesh, such as mesh['dp'], or Roles.",
        )
    names = given.mesh_dim_names or tuple(f"dim{number}" for number in range(given.ndim))
    *outer, inner = (
        Group.from_process_group(name, given.get_group(number)) for number, name in enumerate(names)
    )
    return Roles(inner, inner, *outer)
