"""Which collectives a torch process group gets."""

from __future__ import annotations

import torch.distributed as dist

from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.gloo.collectives import GlooCollectives

__all__ = ["new_collectives"]


def new_collectives(process_group: dist.ProcessGroup) -> DistributedCollectives:
    """New collectives, those that are best on the group's backend. Local.

    Once for each process group, since two would number its messages independently:
    `pcomm.core.groups.communicators.communicator_of` has those that all share.

    Args:
        process_group: A group that this rank belongs to. One that has gloo for tensors on the CPU
            and another backend beside it counts as the other one.
    """
    backend = dist.get_backend(process_group)
    # One with options of its own has a longer name.
    is_gloo = "gloo" in backend and ":" not in backend
    return GlooCollectives(process_group) if is_gloo else DistributedCollectives(process_group)
