"""The choice of the collectives for a torch process group, by its backend."""

from __future__ import annotations

import torch.distributed as dist

from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.gloo.collectives import GlooCollectives

__all__ = ["new_collectives"]


def new_collectives(process_group: dist.ProcessGroup) -> DistributedCollectives:
    """New collectives, the fastest for the group's backend. Local.

    They are made once for each process group, since two would number its messages independently:
    `pcomm.core.groups.communicators.communicator_of` returns those that all share.

    Args:
        process_group: A group that this rank belongs to. One that has gloo for tensors on the CPU
            and another backend beside it counts as the other one.
    """
    backend = dist.get_backend(process_group)
    # One with options of its own has a longer name.
    is_gloo = "gloo" in backend and ":" not in backend
    return GlooCollectives(process_group) if is_gloo else DistributedCollectives(process_group)
