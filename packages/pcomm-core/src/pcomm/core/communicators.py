"""Making one torch communicator under a name that its members have agreed on.

`torch.distributed.new_group` names a group made by its members alone after their ranks and the
number of groups that the process already has, and its members find each other in the store
under that name. Members that own different numbers of groups then wait for each other under
different names, and a group that is opened again after a close finds the addresses of the first
one. With a name of ours neither happens. The function beneath `new_group` takes a name; it is
private to torch, so this file is the only one that calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pcomm.core.options import Granted

__all__ = ["new_communicator"]


def new_communicator(
    name: str, ranks: Sequence[int], granted: Granted, *, description: str
) -> dist.ProcessGroup:
    """A communicator of `ranks`, owned by the caller. Collective: its members call it, no others.

    Args:
        name: The same on all members, and never used before in this job.
        ranks: Global ranks, ascending; this process's rank is one of them.
        granted: Backend and options.
        description: What torch's own reports call it.
    """
    default = distributed_c10d._get_default_group()
    backend = dist.Backend(granted.backend)
    timeout = granted.timeout or distributed_c10d._get_default_timeout(backend)
    if granted.pg_options is not None:
        # Torch warns where the two differ.
        granted.pg_options._timeout = timeout
    process_group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        list(ranks),
        backend,
        distributed_c10d._get_default_store(),
        name,  # type: ignore[arg-type]
        backend_options=granted.pg_options,
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=description,
    )
    distributed_c10d._world.pg_group_ranks[process_group] = {r: i for i, r in enumerate(ranks)}
    assert isinstance(process_group, dist.ProcessGroup)
    return process_group
