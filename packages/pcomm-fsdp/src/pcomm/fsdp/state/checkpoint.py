"""Checkpoints of shards that load on other numbers of ranks, other strategies, and on none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.optim import Optimizer

from pcomm.core.checkpoint.shard_view import FlatPart, ShardView
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel.param_layout import ParamLayout
from pcomm.fsdp.plan.names import ExtraState, unwrapped
from pcomm.fsdp.sharded import Sharded
from pcomm.fsdp.state.optimizer_state import StateOf, state_of
from pcomm.fsdp.state.planners import StateLoadPlanner, StateSavePlanner
from pcomm.fsdp.state.state_view import StateView

__all__ = ["load_checkpoint", "model_shard_views", "optimizer_shard_views", "save_checkpoint"]


def model_shard_views(
    sharded: Sharded,
    *,
    placements: Mapping[str, ParamLayout] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, ShardView]:
    """This rank's part of every parameter and buffer, as `model.NAME`. Local.

    Names are those of the model's state dict, without what `checkpoint_wrapper` and
    `torch.compile` add to them.

    Args:
        sharded: A sharded model.
        placements: Of the parameters before they were sharded, by name in the model, where tensor
            or expert parallelism split them already; see `param_layouts_of`.
        ranks: This rank's place by the scope of `ParamLayout`, where they are split.

    Raises:
        ConfigError: A hook makes other tensors of the state dict than parameters and buffers.
    """
    names = sharded.names()
    names.check_saved_as_it_is("model_shard_views")
    regions = {
        f"model.{names.saved_name(one.name)}": one.region(one.part.detach())
        for one in _parts(sharded, placements, ranks)
    }
    for name, buffer in names.buffers.items():
        value = buffer.holder()[buffer.name]
        regions[f"model.{unwrapped(name)}"] = StateView(
            value, ParamLayout(), 0, holder=buffer.holder, key=buffer.name, device=value.device
        )
    for name, module in names.extras.items():
        regions[f"model.{unwrapped(name)}"] = StateView(
            torch.empty((), device="meta"), ParamLayout(), 0, holder=ExtraState(module), key="state"
        )
    return regions


def optimizer_shard_views(
    sharded: Sharded,
    optimizer: Optimizer,
    *,
    keys: Sequence[str] | None = None,
    placements: Mapping[str, ParamLayout] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, ShardView]:
    """This rank's part of an optimizer's state, as `optimizer.KEY.NAME`. Local.

    The same call serves to save and to load, before the first step and after it: state is looked
    up when a checkpoint is written, and made when one is read that has it. Tensors shaped like the
    parameter are spread like it; others, such as a count of steps, are the same on all ranks, and
    need not be tensors.

    Args:
        sharded: A sharded model.
        optimizer: Of its parameters.
        keys: Which state; None for everything there is.
        placements: See `model_shard_views`.
        ranks: See `model_shard_views`.

    Raises:
        ConfigError: State of a cut parameter that is neither shaped like it nor a single number.
    """
    names = sharded.names()
    states = {id(parameter): state for parameter, state in state_of(optimizer)}
    parts = [one for one in _parts(sharded, placements, ranks) if id(one.part) in states]
    alike = _shaped_alike([(one.part, states[id(one.part)]) for one in parts])
    regions: dict[str, ShardView] = {}
    for one in parts:
        for key, value in states[id(one.part)].items():
            if keys is not None and key not in keys:
                continue
            name = f"optimizer.{key}.{names.saved_name(one.name)}"
            is_tensor = isinstance(value, Tensor) and value.dim() > 0
            if is_tensor and key not in alike and not one.is_local:
                if not one.is_entire:
                    raise _unlike(name, value, one.part)
                if not one.part.numel():
                    # Another rank has the parameter, and its state.
                    continue
            exists = bool(optimizer.state.get(one.part))
            like = value if isinstance(value, Tensor) else torch.empty(())
            region = one.region(like if exists and like is value else like.to("meta"))
            regions[name] = StateView(
                region.tensor.detach().as_subclass(Tensor),
                region.placement,
                region.rank,
                region.part,
                holder=StateOf(optimizer, one.part),
                key=key,
                is_spread=is_tensor and key in alike,
                device=like.device,
                must_agree=True,
            )
    return regions


def save_checkpoint(
    folder: str | os.PathLike[str], regions: Mapping[str, ShardView], group: Group
) -> None:
    """Write regions as a torch.distributed.checkpoint folder. Collective over `group`.

    Args:
        folder: Where to; on storage that all ranks share.
        regions: This rank's tensors; what several ranks hold is written once. Of buffers, and of
            parameters that are not sharded, it is the first rank of `group` that writes its own.
        group: All ranks that hold any part.

    Raises:
        ConfigError: On every rank, if a value is of a kind that cannot be saved.
        DivergenceError: On every rank, if a value that should be the same on all ranks is not.
    """
    with _told(folder), warnings.catch_warnings():
        # One process saves without torch.distributed, which torch warns about each time.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(
            dict(regions),
            storage_writer=FileSystemWriter(Path(folder)),
            planner=StateSavePlanner(),
            process_group=group.process_group,
            no_dist=group.is_identity,
        )


def load_checkpoint(
    folder: str | os.PathLike[str],
    regions: Mapping[str, ShardView],
    group: Group,
    *,
    sharded: Sharded | None = None,
) -> None:
    """Fill regions in place from a checkpoint of any number of ranks. Collective over `group`.

    Args:
        folder: Of `save_checkpoint`.
        regions: This rank's tensors; the checkpoint may hold more.
        group: All ranks.
        sharded: The model that the regions belong to, which then gathers anew.

    Raises:
        ConfigError: On every rank, if a tensor is missing, or has another logical shape.
    """
    planner = StateLoadPlanner()
    with _told(folder), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(
            dict(regions),
            storage_reader=FileSystemReader(Path(folder)),
            planner=planner,
            process_group=group.process_group,
            no_dist=group.is_identity,
        )
    planner.put()
    if sharded is not None:
        sharded.parameters_changed()


@contextmanager
def _told(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Within it, what torch says of an error on some rank is our error, or names the folder."""
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


class _RegionOf:
    """Regions of tensors that are spread like one part of a parameter."""

    def __init__(self, placement: ParamLayout, rank: int, part: FlatPart | None) -> None:
        self._placement, self._rank, self._part = placement, rank, part

    def __call__(self, value: Tensor) -> ShardView:
        return ShardView(value, self._placement, self._rank, self._part)


class _Part(NamedTuple):
    """One parameter as this rank has it.

    Attributes:
        name: In the model.
        part: This rank's part.
        region: Describes what is spread like it.
        is_local: Whether the parameter is not sharded.
        is_entire: Whether no rank has only some of it.
    """

    name: str
    part: Tensor
    region: _RegionOf
    is_local: bool
    is_entire: bool


def _parts(
    sharded: Sharded,
    placements: Mapping[str, ParamLayout] | None,
    ranks: Mapping[str, int] | None,
) -> list[_Part]:
    parts = dict(sharded.named_parameters())
    described: list[_Part] = []
    for plan in sharded.plans:
        for index, name in enumerate(plan.names):
            placement = (placements or {}).get(name, ParamLayout())
            piece = plan.layout.piece(index, plan.rank)
            part = None if plan.is_local else FlatPart(piece.start, plan.layout.shapes[index])
            rank = (ranks or {}).get(placement.scope, 0)
            region = _RegionOf(placement, rank, part)
            is_entire = plan.layout.is_entire(index)
            described.append(_Part(name, parts[name], region, plan.is_local, is_entire))
    return described


def _shaped_alike(states: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> set[str]:
    """Keys of state that has the shape of the parameter, for all of them.

    For one alone the shape may be the same by chance: a vector with one element, of a part of one.
    """
    keys = {key for _, state in states for key in state}
    return {
        key
        for key in keys
        if all(
            not isinstance(state.get(key), Tensor) or state[key].shape == part.shape
            for part, state in states
        )
    }


def _unlike(name: str, value: Tensor, part: Tensor) -> ConfigError:
    return ConfigError(
        f"checkpoint: {name} of shape {tuple(value.shape)}",
        found=f"a parameter of which this rank holds a part of shape {tuple(part.shape)}",
        why="State that is not shaped like its parameter cannot be cut for other numbers of ranks.",
        fix="Use an elementwise optimizer, or leave that key out by keys=.",
    )
