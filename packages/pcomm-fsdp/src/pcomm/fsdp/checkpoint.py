"""Checkpoints of shards that load on other numbers of ranks, other strategies, and on none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.optim import Optimizer

from pcomm.core.checkpoint.planners import RegionLoadPlanner, RegionSavePlanner
from pcomm.core.checkpoint.region import FlatPart, Region
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.group import Group
from pcomm.core.placement import Placement
from pcomm.fsdp.sharded import Sharded

__all__ = ["load_checkpoint", "model_regions", "optimizer_regions", "save_checkpoint"]


def model_regions(
    sharded: Sharded,
    *,
    placements: Mapping[str, Placement] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, Region]:
    """This rank's part of every parameter and buffer, as `model.NAME`. Local.

    Args:
        sharded: A sharded model.
        placements: Of the parameters before they were sharded, by name, where tensor or expert
            parallelism split them already; see `pcomm.core.placement.placements_of`.
        ranks: This rank's place by the scope of `Placement`, where they are split.
    """
    regions = {
        f"model.{name}": region(part.detach())
        for name, part, region in _parts(sharded, placements, ranks)
    }
    for name, value in sharded.buffers():
        regions[f"model.{name}"] = Region(value, Placement(), 0)
    return regions


def optimizer_regions(
    sharded: Sharded,
    optimizer: Optimizer,
    *,
    keys: Sequence[str] | None = None,
    placements: Mapping[str, Placement] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, Region]:
    """This rank's part of an optimizer's state, as `optimizer.KEY.NAME`. Local.

    State that does not exist yet is made by a step with a learning rate of zero, so the same call
    serves to save and to load. Tensors shaped like the parameter are spread like it; others, such
    as a count of steps, are the same on all ranks.

    Args:
        sharded: A sharded model.
        optimizer: Of its parameters.
        keys: Which state; None for every tensor there is.
        placements: See `model_regions`.
        ranks: See `model_regions`.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    _make_state(optimizer)
    regions: dict[str, Region] = {}
    for name, part, region in _parts(sharded, placements, ranks):
        if id(part) not in held:
            continue
        for key, value in optimizer.state[part].items():
            if not isinstance(value, Tensor) or (keys is not None and key not in keys):
                continue
            is_spread = value.shape == part.shape and value.dim() > 0
            whole = Region(value, Placement(), 0)
            regions[f"optimizer.{key}.{name}"] = region(value) if is_spread else whole
    return regions


def save_checkpoint(
    folder: str | os.PathLike[str], regions: Mapping[str, Region], group: Group
) -> None:
    """Write regions as a torch.distributed.checkpoint folder. Collective over `group`.

    Args:
        folder: Where to; on storage that all ranks share.
        regions: This rank's tensors; what several ranks hold is written once.
        group: All ranks that hold any part.
    """
    with warnings.catch_warnings():
        # One process saves without torch.distributed, which torch warns about each time.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(
            dict(regions),
            storage_writer=FileSystemWriter(Path(folder)),
            planner=RegionSavePlanner(),
            process_group=group.process_group,
            no_dist=group.is_identity,
        )


def load_checkpoint(
    folder: str | os.PathLike[str],
    regions: Mapping[str, Region],
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
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(
                dict(regions),
                storage_reader=FileSystemReader(Path(folder)),
                planner=RegionLoadPlanner(),
                process_group=group.process_group,
                no_dist=group.is_identity,
            )
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
    if sharded is not None:
        sharded.parameters_changed()


class _RegionOf:
    """Regions of tensors that are spread like one part of a parameter."""

    def __init__(self, placement: Placement, rank: int, part: FlatPart | None) -> None:
        self._placement, self._rank, self._part = placement, rank, part

    def __call__(self, value: Tensor) -> Region:
        return Region(value, self._placement, self._rank, self._part)


def _parts(
    sharded: Sharded,
    placements: Mapping[str, Placement] | None,
    ranks: Mapping[str, int] | None,
) -> list[tuple[str, Tensor, _RegionOf]]:
    """Each parameter's name, this rank's part of it, and how to describe what is spread alike."""
    parts = dict(sharded.named_parameters())
    described: list[tuple[str, Tensor, _RegionOf]] = []
    for plan in sharded.plans:
        for index, name in enumerate(plan.names):
            placement = (placements or {}).get(name, Placement())
            piece = plan.layout.piece(index, plan.rank)
            part = None if plan.is_local else FlatPart(piece.start, plan.layout.shapes[index])
            rank = (ranks or {}).get(placement.scope, 0)
            described.append((name, parts[name], _RegionOf(placement, rank, part)))
    return described


def _make_state(optimizer: Optimizer) -> None:
    """Have the optimizer make the state that its first step makes, and change nothing."""
    if any(optimizer.state.values()):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor):
            step.zero_()
