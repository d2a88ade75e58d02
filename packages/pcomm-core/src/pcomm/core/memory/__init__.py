"""Memory that communicators know of: registered pools."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.memory.pools.arena import Arena
    from pcomm.core.memory.pools.backend import PoolBackend
    from pcomm.core.memory.pools.fake import FakePools
    from pcomm.core.memory.pools.nccl import NcclPools
    from pcomm.core.memory.pools.registry import Binding, PoolRegistry

__all__ = ["Arena", "Binding", "FakePools", "NcclPools", "PoolBackend", "PoolRegistry"]

__getattr__, __dir__ = face(
    __name__,
    {
        "Arena": "pools.arena",
        "Binding": "pools.registry",
        "FakePools": "pools.fake",
        "NcclPools": "pools.nccl",
        "PoolBackend": "pools.backend",
        "PoolRegistry": "pools.registry",
    },
)
