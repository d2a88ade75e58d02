"""`separate_communicators`: gathers and reduces of torch's own FSDP2 in groups of their own.

FSDP2 sends both through the process group of its mesh. Its `set_custom_all_gather` and
`set_custom_reduce_scatter` take something else in the place of torch's collectives; here that is a
communicator for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.fsdp.settings import group_from

__all__ = ["Fsdp2Communicators", "separate_communicators"]


def separate_communicators(
    model: nn.Module,
    *,
    gather: Group | dist.ProcessGroup | DeviceMesh | None = None,
    reduce: Group | dist.ProcessGroup | DeviceMesh | None = None,
) -> Fsdp2Communicators:
    """Have a model of torch's FSDP2 gather and reduce in groups of their own. Local.

    Every rank of the mesh does the same, between steps. Nothing else of the model changes: units,
    shards, checkpoints and optimizers stay FSDP2's. On gloo, buffers of 256 KiB a rank and more go
    between pairs of ranks, and a reduce sends half the bytes of torch's. With two ranks losses and
    gradients have the bits of FSDP2 as shipped; with more, gloo adds in another order. Other
    backends run torch's own operation in the group.

    Args:
        model: A model, or a part of one, that `torch.distributed.fsdp.fully_shard` has sharded.
        gather: Group for gathers of parameters, over the ranks that shard them, in their order;
            None leaves the mesh's. A Group, torch's ProcessGroup or a mesh of one dimension.
        reduce: Group for reduce-scatters of gradients, over the same ranks; None leaves the mesh's.
            Sums over the replicas of HSDP stay in the mesh's.

    Returns:
        What was set; its `undo`, and closing one of the groups, sets back what was there before.

    Raises:
        ConfigError: A model that FSDP2 has not sharded, no group, or a module with communication
            of its own, such as that of an earlier call. Then nothing is changed.
        TopologyError: A group over other ranks than those that shard a module.
        UnsupportedError: A module that torch allows no communication of its own: one with several
            groups of parameters; or a device that a group's backend does not know.
    """
    own = {
        name: group_from(f"separate_communicators: {name}", one)
        for name, one in (("gather", gather), ("reduce", reduce))
        if one is not None
    }
    modules = dict(_sharded_modules(model))
    if not own or not modules:
        raise ConfigError(
            f"separate_communicators({type(model).__name__})",
            found="no module that FSDP2 has sharded" if own else "neither gather= nor reduce=",
            why="It changes the groups in which a model of FSDP2 gathers or reduces.",
            fix="Call it after torch.distributed.fsdp.fully_shard, with a group or two; a model "
            "of pcomm.fsdp.fully_shard names its groups in Roles.",
        )
    for name, module in modules.items():
        _check(name, module, own)
    before = [_Before.of(module) for module in modules.values()]
    # One for all modules, so that each group has one order of operations.
    gathers = OwnAllGather(own["gather"]) if "gather" in own else None
    reduces = OwnReduceScatter(own["reduce"]) if "reduce" in own else None
    for module in modules.values():
        # Torch exports no base class for them; it asks for no more than these methods.
        if gathers is not None:
            module.set_custom_all_gather(gathers)  # type: ignore[arg-type]
        if reduces is not None:
            module.set_custom_reduce_scatter(reduces)  # type: ignore[arg-type]
    return Fsdp2Communicators(tuple(modules), before, list(own.values()))


class Fsdp2Communicators:
    """The communicators that a model of FSDP2 was given.

    Args:
        names: The modules that have them.
        before: What these modules communicated through before.
        groups: The groups.

    Attributes:
        names: Names in the model of the modules that communicate through them.
    """

    def __init__(
        self, names: Sequence[str], before: Sequence[_Before], groups: Sequence[Group]
    ) -> None:
        self.names = tuple(names)
        self._before = list(before)
        self._take_back: list[Callable[[], None]] = [
            group.before_close(self.undo, is_local=True) for group in groups
        ]

    def undo(self) -> None:
        """Have the model communicate as before the call. Local; again does nothing."""
        before, self._before = self._before, []
        for one in before:
            one.set_back()
        take_back, self._take_back = self._take_back, []
        for call in take_back:
            call()


@dataclass(frozen=True)
class _Before:
    """The communication that a module had."""

    module: FSDPModule
    all_gather: Any
    reduce_scatter: Any

    @classmethod
    def of(cls, module: FSDPModule) -> _Before:
        group = _parameter_groups(module)[0]
        return cls(module, group._all_gather_comm, group._reduce_scatter_comm)

    def set_back(self) -> None:
        self.module.set_custom_all_gather(self.all_gather)
        self.module.set_custom_reduce_scatter(self.reduce_scatter)


def _sharded_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """The modules that FSDP2 gathers and reduces one by one."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and _parameter_groups(module):
            yield name or "(root)", module


def _parameter_groups(module: FSDPModule) -> list[Any]:
    # Torch has no public way to read what it takes by its public setters.
    state: Any = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        # Torch 2.10 has one at most.
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(found)


def _check(name: str, module: FSDPModule, own: dict[str, Group]) -> None:
    """A module can have these groups. Local."""
    asked = f"separate_communicators: module {name!r}"
    groups = _parameter_groups(module)
    if len(groups) > 1:
        raise UnsupportedError(
            asked,
            found=f"{len(groups)} groups of parameters, each with a mesh of its own",
            why="Torch takes one way to communicate for a module.",
            fix="Shard what has another mesh as a module of its own.",
        )
    for kind, comm in (
        ("gather", groups[0]._all_gather_comm),
        ("reduce", groups[0]._reduce_scatter_comm),
    ):
        if kind in own and not type(comm).__name__.startswith("Default"):
            raise ConfigError(
                asked,
                found=f"a {type(comm).__name__} for its {kind}s already",
                why="One takes the place of the other.",
                fix="Undo the earlier call first: its result has undo().",
            )
    if not hasattr(groups[0].mesh_info, "shard_mesh_size"):
        raise ConfigError(
            asked,
            found="parameters that are replicated, and not sharded",
            why="Nothing is gathered or reduce-scattered.",
            fix="Shard it with torch.distributed.fsdp.fully_shard.",
        )
    ranks = tuple(dist.get_process_group_ranks(groups[0].mesh_info.shard_process_group))
    device = groups[0].device
    for kind, group in own.items():
        if group.ranks != ranks:
            raise TopologyError(
                f"{asked}, {kind}={group.key}",
                found=f"ranks {list(group.ranks)}, and a mesh of ranks {list(ranks)}",
                why="Shards lie on the ranks of the mesh, in its order.",
                fix="Open the group over the ranks of the mesh; where modules have several meshes, "
                "call it for each part of the model.",
            )
        backends = _device_types(group)
        if group.size > 1 and device.type not in backends:
            raise UnsupportedError(
                f"{asked}, {kind}={group.key}",
                found=f"parameters on {device}, and backends for {', '.join(sorted(backends))}",
                why="The group cannot send what lies there.",
                fix="Open the group with the backend of the model's mesh.",
            )


def _device_types(group: Group) -> set[str]:
    found = group.process_group
    return set() if found is None else {device.type for device in found._device_types}


class _Gathering(dist.Work):
    """A gather under way, as torch waits for it."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._pending.wait()
        return True


class _OfGroup:
    """Communication in a group, whichever one torch names; memory as torch allocates it."""

    def __init__(self, group: Group) -> None:
        self._group, self._collectives = group, group.collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of a buffer that is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _is_between_pairs(self, x: Tensor) -> bool:
        # A group whose collectives were replaced, to trace or to compare, goes through those.
        return x.device.type == "cpu" and type(self._collectives) is not DistributedCollectives


class OwnAllGather(_OfGroup):
    """An all-gather behind torch's interface.

    Args:
        group: The group that it runs in.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` of all ranks. Collective."""
        if not self._is_between_pairs(input_tensor):
            own = self._group.process_group
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work: dist.Work | None = gather(
                output_tensor, input_tensor, group=own, async_op=async_op
            )
            return work
        if async_op:
            pending = self._collectives.all_gather_async(input_tensor, out=output_tensor)
            return _Gathering(pending)
        self._collectives.all_gather(input_tensor, out=output_tensor)
        return None


class OwnReduceScatter(_OfGroup):
    """A reduce-scatter behind torch's interface.

    Args:
        group: The group that it runs in.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` of all ranks to this rank's part. Collective."""
        is_mean = op == dist.ReduceOp.AVG
        is_known = is_mean or op == dist.ReduceOp.SUM
        if not is_known or async_op or not self._is_between_pairs(input_tensor):
            own = self._group.process_group
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            work: dist.Work | None = scatter(
                output_tensor, input_tensor, op=op, group=own, async_op=async_op
            )
            return work
        self._reduce(output_tensor, input_tensor, is_mean=is_mean)
        return None

    def _reduce(self, output: Tensor, x: Tensor, *, is_mean: bool) -> None:
        self._collectives.reduce_scatter(x, out=output)
        if is_mean:
            output.div_(self._collectives.size)
