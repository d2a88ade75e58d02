from pcomm.core.memory.pool_backends import FakePools as FakePools
from pcomm.core.memory.pool_backends import NcclPools as NcclPools
from pcomm.core.memory.pool_backends import PoolBackend as PoolBackend
from pcomm.core.memory.pools import Arena as Arena
from pcomm.core.memory.pools import Binding as Binding
from pcomm.core.memory.pools import PoolRegistry as PoolRegistry
from pcomm.core.memory.symmetric_memory import SymmetricMemory as SymmetricMemory
