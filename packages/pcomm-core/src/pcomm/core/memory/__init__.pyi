from pcomm.core.memory.pools.arena import Arena as Arena
from pcomm.core.memory.pools.backend import PoolBackend as PoolBackend
from pcomm.core.memory.pools.fake import FakePools as FakePools
from pcomm.core.memory.pools.nccl import NcclPools as NcclPools
from pcomm.core.memory.pools.registry import Binding as Binding
from pcomm.core.memory.pools.registry import PoolRegistry as PoolRegistry
from pcomm.core.memory.symmetric.symmetric_memory import SymmetricMemory as SymmetricMemory
