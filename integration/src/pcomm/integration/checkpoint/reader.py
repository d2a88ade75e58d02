"""Reading a checkpoint back, on the ranks that wrote it or on others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from pcomm.core import Group, PcommError
from pcomm.core.checkpoint import SafeReader, ShardLoadPlanner, ShardView
from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import Checkpoint

__all__ = ["check_index", "read"]


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
        checkpoint: A whole one.
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
