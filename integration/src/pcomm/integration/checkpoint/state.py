"""What a checkpoint holds, of which run it is, and how it is read on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from pcomm import fsdp
from pcomm.core import Group, PcommError
from pcomm.core.checkpoint import SafeReader, ShardLoadPlanner, ShardView
from pcomm.core.errors import ConfigError
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.fsdp import Sharded
from pcomm.integration.checkpoint.folders import Checkpoint
from pcomm.integration.config.sections import Config
from pcomm.integration.config.toml import to_dict
from pcomm.ntp import NtpPlan
from pcomm.ntp.redistribute import shard_views, state_tensors

__all__ = [
    "check_index",
    "check_same_run",
    "identity_of",
    "model_shard_views",
    "planned_shard_views",
    "read",
    "set_optimizer_step",
    "training_shard_views",
]

# What decides the weights and the batches. The rest (length of the run, learning rate, parallel
# sizes, precision, evaluation, checkpoints) may change between one start and the next.
_TRAIN = ("seed", "sequence_length", "global_batch_tokens", "optimizer")

# What checkpoints mean that say nothing of a key, since they are older than the choice.
_BEFORE: Mapping[str, object] = {"train.optimizer": "adamw", "train.weights": []}

# What no key of the configuration is called.
_WORDS = {
    "data.fingerprint": "the text of data.path, or its split (a hash of both)",
    "train.weights": "data.weights",
}


def identity_of(config: Config, corpus: str | None = None) -> dict[str, Any]:
    """What must not change when a run is resumed; goes into every checkpoint.

    Args:
        config: The validated configuration, in which derived sizes are numbers and not `auto`.
        corpus: Fingerprint of the tokenised text; None to compare the rest before there is one.
    """
    sections = to_dict(config)
    data = {"vocabulary": config.data.vocabulary}
    batches = {name: sections["train"][name] for name in _TRAIN}
    # Where the first weights came from does not matter to those that are saved.
    sections["model"].pop("from")
    return {
        "model": sections["model"],
        "data": data if corpus is None else {**data, "fingerprint": corpus},
        "train": {**batches, "weights": sections["data"]["weights"]},
    }


def check_same_run(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another model or other batches. Local.

    Raises:
        ConfigError: Names every key that differs, with both values.
    """
    told = _keys(checkpoint.state().get("identity"))
    saved = {**_BEFORE, **told}
    differences = [
        f"{_WORDS.get(key, key)} was {saved.get(key)!r} and is {value!r}"
        for key, value in _keys(identity).items()
        # What was converted has seen no batch yet, so it says nothing of them.
        if saved.get(key) != value and (checkpoint.step or key in told)
    ]
    if differences:
        raise ConfigError(
            f"checkpoint {checkpoint.folder}",
            found="; ".join(differences),
            why="These decide the weights and the batches, so the run would not be the same one.",
            fix="Go back to the run's configuration, choose another --out, or start over "
            "with --restart.",
        )


def _keys(identity: object) -> dict[str, object]:
    """`section.key` to value; of a damaged file, what can be made out."""
    sections = identity.items() if isinstance(identity, dict) else ()
    return {
        f"{section}.{name}": value
        for section, values in sections
        if isinstance(values, dict)
        for name, value in values.items()
    }


_MOMENTS, _MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def model_shard_views(
    model: nn.Module, ranks: Mapping[str, int] | None = None
) -> dict[str, ShardView]:
    """The parameters of a model that is not sharded over replicas. Local.

    Args:
        model: The model, or this rank's part of it under tensor parallelism.
        ranks: Rank of this process by the scope of `ParamLayout`; None where one rank has all.
    """
    layouts, ranks = param_layouts_of(model), ranks or {}
    return {
        f"model.{name}": ShardView(parameter.detach(), own, ranks.get(own.scope, 0))
        for name, parameter in model.named_parameters()
        for own in (layouts[name],)
    }


def training_shard_views(
    sharded: Sharded,
    optimizer: Optimizer,
    layouts: Mapping[str, ParamLayout],
    ranks: Mapping[str, int],
) -> dict[str, ShardView]:
    """This rank's part of a model in training: parameters, and averages of their gradients. Local.

    AdamW has two of each, and Muon one. Those that do not exist yet are made, as zeros, with a step
    count of zero; so the same call serves to save and to load.

    Args:
        sharded: The model.
        optimizer: Optimizer of its parameters.
        layouts: `ParamLayout` of each parameter, by name.
        ranks: Rank of this process by the scope of `ParamLayout`.
    """
    _make_moments(optimizer)
    views = fsdp.model_shard_views(sharded, param_layouts=layouts, ranks=ranks)
    return views | fsdp.optimizer_shard_views(
        sharded, optimizer, keys=(*_MOMENTS, *_MOMENTUM), param_layouts=layouts, ranks=ranks
    )


def planned_shard_views(
    model: nn.Module, optimizer: Optimizer, plan: NtpPlan, rank: int
) -> dict[str, ShardView]:
    """The same of a replica whose degree is its own, under the same names. Local.

    Replicas are cut at different places and hold the same numbers, so one of them is saved, and
    all of them read.

    Args:
        model: The model.
        optimizer: AdamW of its parameters.
        plan: The plan of the job.
        rank: Global rank of this process.
    """
    _make_moments(optimizer)
    tensors = state_tensors(model, optimizer)
    return shard_views(plan, rank, tensors, param_layouts_of(model))


def _make_moments(optimizer: Optimizer) -> None:
    """Make averages where there are none yet: zeros, for AdamW with a step count of zero. Local.

    That is what a first step begins with, so nothing changes.
    """
    for group in optimizer.param_groups:
        is_muons = "momentum" in group
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                for moment in _MOMENTUM if is_muons else _MOMENTS:
                    state[moment] = torch.zeros_like(parameter)
                if not is_muons:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)


def set_optimizer_step(optimizer: Optimizer, step: int) -> None:
    """Tell AdamW how many steps its averages have seen. Local."""
    for state in optimizer.state.values():
        if "step" in state:
            counted: Tensor = state["step"]
            counted.fill_(float(step))


def check_index(checkpoint: Checkpoint) -> None:
    """Make sure that the list of what a checkpoint holds can be read. Local.

    To be called before `read`, in which a rank that cannot read it would leave the others alone.

    Raises:
        ConfigError: It cannot.
    """
    try:
        SafeReader(checkpoint.folder).read_metadata()
    except Exception as error:  # whatever unpickling a damaged file may raise
        raise _damaged(checkpoint, error) from error


def read(
    checkpoint: Checkpoint, views: Mapping[str, ShardView], group: Group | None = None
) -> None:
    """Fill `views` in place from a checkpoint written by any number of ranks.

    Runs nothing that the files name: see `SafeReader`. Whether they are as they were written is
    checked by `check_files`.

    Args:
        checkpoint: A checkpoint that is whole.
        views: This rank's tensors, with the logical shapes that were saved.
        group: All ranks, which then read together; without it this process reads alone.

    Raises:
        ConfigError: On every rank, if on one of them a tensor is missing, has another logical
            shape, or lies in a damaged file.
    """
    alone, planner = group is None or group.is_identity, ShardLoadPlanner()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # One process reads without torch.distributed, which torch warns about each time.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(
                dict(views),
                storage_reader=SafeReader(checkpoint.folder),
                planner=planner,
                process_group=None if group is None else group.process_group,
                no_dist=alone,
            )
    except CheckpointException as failed:
        error = failed.failures[min(failed.failures)][0]
        if isinstance(error, PcommError):
            raise error from failed
        raise _damaged(checkpoint, error) from failed
    planner.put()


def _damaged(checkpoint: Checkpoint, error: BaseException) -> ConfigError:
    return ConfigError(
        f"checkpoint {checkpoint.folder}",
        found=f"a file that cannot be read: {type(error).__name__}: {error}",
        why="The weights cannot be put together without all of its files.",
        fix="Remove this folder to go on from the checkpoint before it.",
    )
