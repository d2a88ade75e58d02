"""Pools of NCCL memory and the communicators of torch that register it.

Never run yet: no GPU was at hand. `tests/gpu/test_pools_on_nccl.py` is the test.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.memory.pools.backend import PoolCommunicator

__all__ = ["NcclPools"]


class NcclPools:
    """The `PoolBackend` of torch's `ProcessGroupNCCL` and `torch.cuda.MemPool`. Local.

    The communicator of a group has to be initialised before memory is registered with it: by one
    collective, or by a `device_id` given to `init_process_group`.

    Args:
        group: Any group on NCCL; pools get their memory from its allocator.

    Raises:
        UnsupportedError: Its communicator cannot register memory, or there is none.
    """

    def __init__(self, group: Group) -> None:
        communicator = self.communicator(group)
        if communicator is None:
            raise _unsupported(group, "a group of one rank, without a communicator")
        self._allocator: Any = communicator.registrar.mem_allocator

    def new_pool(self) -> torch.cuda.MemPool:
        """An empty pool of memory that NCCL allocates."""
        return torch.cuda.MemPool(self._allocator)

    def allocating(self, pool: torch.cuda.MemPool) -> AbstractContextManager[Any]:
        """Tensors made on this thread are made in `pool`."""
        return torch.cuda.use_mem_pool(pool)

    def segments(self, pool: torch.cuda.MemPool) -> tuple[tuple[int, int], ...]:
        """Address and bytes of every segment, in the order of the snapshot, as torch goes."""
        return tuple((segment["address"], segment["total_size"]) for segment in pool.snapshot())

    def address(self, pool: torch.cuda.MemPool, storage: torch.UntypedStorage) -> int:
        """That of the storage itself."""
        return storage.data_ptr()

    def quiesce(self) -> None:
        """Wait for all streams of this rank's device."""
        torch.cuda.synchronize()

    def communicator(self, group: Group) -> PoolCommunicator | None:
        """That of `group`; None for one rank without a communicator."""
        process_group = group.process_group
        if process_group is None:
            return None
        if "nccl" not in dist.get_backend(process_group):
            raise _unsupported(group, f"a communicator of {dist.get_backend(process_group)}")
        registrar = process_group._get_backend(torch.device("cuda"))
        # A backend without them raises AttributeError half-way (pytorch #191951).
        if not hasattr(registrar, "register_mem_pool"):
            raise _unsupported(group, f"{type(registrar).__name__} without register_mem_pool")
        return PoolCommunicator(process_group.group_name, group.ranks, registrar)


def _unsupported(group: Group, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"pools: memory for group {group.key}",
        found=found,
        why="Only torch's ProcessGroupNCCL registers memory with a communicator.",
        fix="Open the group with backend 'nccl' on a build of torch that has register_mem_pool.",
    )
