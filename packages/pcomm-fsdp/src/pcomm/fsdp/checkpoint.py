"""Shard views of a model and its optimizer, which torch.distributed.checkpoint saves and loads."""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pcomm.core.checkpoint.dcp import SafeReader, ShardLoadPlanner, ShardSavePlanner
from pcomm.core.checkpoint.views import FlatRange, ShardView, StateView
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel.split import ParamLayout
from pcomm.fsdp.full_state import ExtraState, unwrapped
from pcomm.fsdp.settings import group_from
from pcomm.fsdp.sharded import Sharded

__all__ = [
    "load_checkpoint",
    "model_shard_views",
    "optimizer_shard_views",
    "save_checkpoint",
]


def model_shard_views(
    sharded: Sharded,
    *,
    param_layouts: Mapping[str, ParamLayout] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, ShardView]:
    """This rank's shard of every parameter, and every buffer, as `model.NAME`. Local.

    Names are those of the model's state dict, without what `checkpoint_wrapper` and
    `torch.compile` add to them.

    Args:
        sharded: A sharded model.
        param_layouts: Layouts of the parameters before they were sharded, by name in the model,
            where tensor or expert parallelism split them already; from `param_layouts_of`.
        ranks: This rank's place in the group of each scope of `param_layouts`, where they are
            split.

    Raises:
        ConfigError: A hook makes other tensors of the state dict than parameters and buffers.
    """
    names = sharded.names()
    names.check_saved_as_it_is("model_shard_views")
    views: dict[str, ShardView] = {
        f"model.{names.saved_name(one.name)}": one.view(one.shard.detach())
        for one in _shards(sharded, param_layouts, ranks)
    }
    for name, buffer in names.buffers.items():
        value = buffer.holder()[buffer.name]
        views[f"model.{unwrapped(name)}"] = StateView(
            value, ParamLayout(), 0, holder=buffer.holder, key=buffer.name, device=value.device
        )
    for name, module in names.extras.items():
        views[f"model.{unwrapped(name)}"] = StateView(
            torch.empty((), device="meta"), ParamLayout(), 0, holder=ExtraState(module), key="state"
        )
    return views


def optimizer_shard_views(
    sharded: Sharded,
    optimizer: Optimizer,
    *,
    keys: Sequence[str] | None = None,
    param_layouts: Mapping[str, ParamLayout] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, ShardView]:
    """This rank's shard of an optimizer's state, as `optimizer.KEY.NAME`. Local.

    The same call serves to save and to load, before the first step and after it: state is looked
    up when a checkpoint is written, and made when one is read that has it. Tensors shaped like the
    parameter are spread like it; others, such as a count of steps, are the same on all ranks, and
    need not be tensors.

    Args:
        sharded: A sharded model.
        optimizer: An optimizer of its parameters.
        keys: Names of the state to take; None for everything there is.
        param_layouts: Layouts of the parameters, as in `model_shard_views`.
        ranks: This rank's places, as in `model_shard_views`.

    Raises:
        ConfigError: State of a cut parameter that is neither shaped like it nor a single number.
    """
    names = sharded.names()
    states = {id(parameter): state for parameter, state in _state_of(optimizer)}
    shards = [one for one in _shards(sharded, param_layouts, ranks) if id(one.shard) in states]
    alike = _shaped_alike([(one.shard, states[id(one.shard)]) for one in shards])
    views: dict[str, ShardView] = {}
    for one in shards:
        for key, value in states[id(one.shard)].items():
            if keys is not None and key not in keys:
                continue
            name = f"optimizer.{key}.{names.saved_name(one.name)}"
            is_tensor = isinstance(value, Tensor) and value.dim() > 0
            if is_tensor and key not in alike and one.flat_range is not None:
                if not one.is_entire:
                    raise ConfigError(
                        f"checkpoint: {name} of shape {tuple(value.shape)}",
                        found="a parameter of which this rank holds a shard of shape "
                        f"{tuple(one.shard.shape)}",
                        why="State that is not shaped like its parameter cannot be cut for other "
                        "numbers of ranks.",
                        fix="Use an elementwise optimizer, or leave that key out by keys=.",
                    )
                if not one.shard.numel():
                    # Another rank has the parameter, and its state.
                    continue
            exists = bool(optimizer.state.get(one.shard))
            like = value if isinstance(value, Tensor) else torch.empty(())
            tensor = like if exists and like is value else like.to("meta")
            views[name] = StateView(
                tensor.detach().as_subclass(Tensor),
                one.param_layout,
                one.rank,
                one.flat_range,
                holder=_StateOf(optimizer, one.shard),
                key=key,
                is_spread=is_tensor and key in alike,
                device=like.device,
                must_agree=True,
            )
    return views


def save_checkpoint(
    folder: str | os.PathLike[str],
    views: Mapping[str, ShardView],
    group: Group | dist.ProcessGroup | DeviceMesh,
) -> None:
    """Write shard views as a torch.distributed.checkpoint folder. Collective over `group`.

    Args:
        folder: Folder to write, on storage that all ranks share.
        views: This rank's tensors by name; a chunk that several ranks hold is written once.
            Buffers, and parameters that are not sharded, are taken from the first rank of `group`
            that has them.
        group: All ranks that hold a shard; of a mesh, its one dimension.

    Raises:
        ConfigError: On every rank, if a value is of a kind that cannot be saved; no group.
        DivergenceError: On every rank, if a value that should be the same on all ranks is not.
    """
    group = group_from("save_checkpoint", group)
    with _dcp_errors(folder), warnings.catch_warnings():
        # One process saves without torch.distributed, which torch warns about each time.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(
            dict(views),
            storage_writer=FileSystemWriter(Path(folder)),
            planner=ShardSavePlanner(is_first_rank_saved=True),
            process_group=group.process_group,
            no_dist=group.is_identity,
        )


def load_checkpoint(
    folder: str | os.PathLike[str],
    views: Mapping[str, ShardView],
    group: Group | dist.ProcessGroup | DeviceMesh,
    *,
    sharded: Sharded | None = None,
) -> None:
    """Fill shard views in place from a checkpoint of any number of ranks. Collective over `group`.

    Runs nothing that the files name, unlike torch's own reader.

    Args:
        folder: Folder that `save_checkpoint` has written.
        views: This rank's tensors by name; the checkpoint may hold more.
        group: All ranks; of a mesh, its one dimension.
        sharded: The model of the views, which then gathers anew; None if no model is sharded.

    Raises:
        ConfigError: On every rank, if a tensor is missing, has another logical shape, or a
            file is damaged or names more than a checkpoint holds.
    """
    group, planner = group_from("load_checkpoint", group), ShardLoadPlanner()
    with _dcp_errors(folder), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(
            dict(views),
            storage_reader=SafeReader(Path(folder)),
            planner=planner,
            process_group=group.process_group,
            no_dist=group.is_identity,
        )
    planner.put()
    if sharded is not None:
        sharded.parameters_changed()


@contextmanager
def _dcp_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Within it, an error of some rank inside torch is raised as our own, or names the folder."""
    try:
        yield
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        if isinstance(error, PcommError):
            raise error from failed
        raise ConfigError(
            f"checkpoint {folder}",
            found=f"{type(error).__name__}: {error}",
            why="The weights cannot be put together without all of its files.",
            fix="Check that the folder is whole and that every rank can read it.",
        ) from failed


class _Shard(NamedTuple):
    """This rank's shard of one parameter.

    Attributes:
        name: Name of the parameter in the model.
        shard: The shard.
        param_layout: Layout of the parameter before it was sharded.
        rank: This rank's place in the group of that layout.
        flat_range: Range of the shard in the parameter; None if it is not sharded.
        is_entire: True if no rank has only some of it.
    """

    name: str
    shard: Tensor
    param_layout: ParamLayout
    rank: int
    flat_range: FlatRange | None
    is_entire: bool

    def view(self, tensor: Tensor) -> ShardView:
        """A view of a tensor that is spread like the shard."""
        return ShardView(tensor, self.param_layout, self.rank, self.flat_range)


def _shards(
    sharded: Sharded,
    param_layouts: Mapping[str, ParamLayout] | None,
    ranks: Mapping[str, int] | None,
) -> list[_Shard]:
    parameters = dict(sharded.named_parameters())
    shards: list[_Shard] = []
    for plan in sharded.plans:
        for index, name in enumerate(plan.names):
            layout = (param_layouts or {}).get(name, ParamLayout())
            rank = (ranks or {}).get(layout.scope, 0)
            start = plan.layout.shard_range(index, plan.rank).start
            held = None if plan.is_local else FlatRange(start, plan.layout.shapes[index])
            is_entire = plan.layout.is_entire(index)
            shards.append(_Shard(name, parameters[name], layout, rank, held, is_entire))
    return shards


def _shaped_alike(states: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> set[str]:
    """Keys of state that has the shape of the parameter, for all of them.

    For one alone the shape may be the same by chance: a vector with one element, of a shard of one.
    """
    keys = {key for _, state in states for key in state}
    return {
        key
        for key in keys
        if all(
            not isinstance(state.get(key), Tensor) or state[key].shape == shard.shape
            for shard, state in states
        )
    }


class _StateOf:
    """Finds an optimizer's state of one parameter; a call returns the mapping itself.

    An optimizer's `load_state_dict` makes another mapping, so it is looked up each time.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    def __call__(self) -> MutableMapping[str, Any]:
        """The mapping as it is now."""
        found: MutableMapping[str, Any] = self._optimizer.state[self._parameter]
        return found


def _state_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """Each parameter and its state, or that which its first step will make. Local.

    The optimizer is not changed: whether it has stepped is part of its state. A momentum that is
    not there yet becomes the first gradient, and one of zero does not.

    Raises:
        ConfigError: State that does not exist yet cannot be foreseen.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            existing = optimizer.state.get(parameter)
            if existing:
                yield parameter, existing
            elif parameter.requires_grad:
                yield parameter, _foreseen(optimizer, group, parameter)


def _foreseen(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> Mapping[str, Any]:
    """State after one step of an optimizer of the same kind, with one parameter of its own."""
    own = nn.Parameter(torch.zeros_like(parameter))
    own.grad = torch.zeros_like(own)
    other = object.__new__(type(optimizer))
    # A learning-rate schedule replaces `step` by one that is bound to the original.
    vars(other).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(other)[hooks] = OrderedDict()
    settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    other.param_groups = [{**settings, "params": [own]}]
    other.state = defaultdict(dict)
    try:
        other.step()
    except Exception as error:
        raise ConfigError(
            f"state of {type(optimizer).__name__} before its first step",
            found=f"{type(error).__name__}: {error}",
            why="Names and shapes of state are those that a step with zero gradients makes.",
            fix="Let the optimizer make its state, by a step, before shard views are asked for.",
        ) from error
    found: Mapping[str, Any] = other.state[own]
    return found
