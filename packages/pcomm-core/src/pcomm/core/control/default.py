"""The control used where none is given: some ranks of torch.distributed, in its store."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pcomm.core.control.control import Control
from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.process.unconnected_default import is_connected

__all__ = ["control_of_group", "default_control"]


def default_control(ranks: Sequence[int] | None = None) -> Control:
    """The control of `ranks` of torch.distributed, by default all of them; generation 0. Local.

    Raises:
        ConfigError: torch.distributed has not begun, or has ended.
        TopologyError: This process is not one of `ranks`.
    """
    if not is_connected():
        raise ConfigError(
            "default_control",
            found="torch.distributed is not initialised",
            why="Ranks meet in a store, and without a Control it is that of torch.distributed.",
            fix="Call it between init_process_group and destroy_process_group, or give a Control.",
        )
    chosen = range(dist.get_world_size()) if ranks is None else ranks
    return Control(distributed_c10d._get_default_store(), chosen, dist.get_rank())


def control_of_group(group: Group, control: Control | None = None) -> Control:
    """The control of the ranks of a group: a part of `control`, its own, or the default one. Local.

    Raises:
        ConfigError: torch.distributed has not begun, or has ended.
        TopologyError: A rank of the group is not in `control`.
    """
    if control is not None:
        return control.among(group.ranks)
    if group.control is not None:
        return group.control
    if group.size == 1:
        return Control(None, group.ranks, group.ranks[0])
    return default_control(group.ranks)
