"""The interface of the registry to pools and communicators, so that a fake can replace NCCL."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pcomm.core.groups.group import Group

__all__ = ["PoolBackend", "PoolCommunicator"]


@dataclass(frozen=True)
class PoolCommunicator:
    """A communicator that memory is registered with.

    Args:
        uid: Name of the communicator; two groups that share one have the same.
        ranks: Global ranks of its members.
        registrar: Object with `register_mem_pool(pool, symm)` and `deregister_mem_pool(pool)` of
            torch's semantics; see `pcomm.core.memory.pools.fake`.
    """

    uid: str
    ranks: tuple[int, ...]
    registrar: Any


class PoolBackend(Protocol):
    """Pools and communicators of one kind of device. Everything here is local."""

    def new_pool(self) -> Any:
        """An empty pool."""
        ...

    def allocating(self, pool: Any) -> AbstractContextManager[Any]:
        """A `with` block in which tensors are made in `pool`."""
        ...

    def segments(self, pool: Any) -> tuple[tuple[int, int], ...]:
        """Address and bytes of every segment of `pool`, in the order of their registration."""
        ...

    def address(self, pool: Any, storage: torch.UntypedStorage) -> int:
        """Where the memory lies that `storage` has just got within `allocating(pool)`."""
        ...

    def quiesce(self) -> None:
        """Return when the device has done all that it was given."""
        ...

    def communicator(self, group: Group) -> PoolCommunicator | None:
        """The communicator of `group`; None for a group that has none.

        Raises:
            UnsupportedError: The communicator cannot register memory.
        """
        ...
