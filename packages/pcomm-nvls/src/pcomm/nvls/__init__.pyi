from pcomm.nvls._capability import Capability as Capability
from pcomm.nvls._capability import capability as capability
from pcomm.nvls._nvls_collectives import nvls_collectives as nvls_collectives
from pcomm.nvls._self_test import self_test as self_test
from pcomm.nvls.collectives.fused_rmsnorm import all_reduce_add_rmsnorm as all_reduce_add_rmsnorm
from pcomm.nvls.collectives.fused_rmsnorm import (
    reduce_scatter_add_rmsnorm_all_gather as reduce_scatter_add_rmsnorm_all_gather,
)
from pcomm.nvls.collectives.gathers import all_gather_coalesced as all_gather_coalesced
from pcomm.nvls.collectives.gathers import all_gather_into_tensor as all_gather_into_tensor
from pcomm.nvls.collectives.gathers import gather_to_rank as gather_to_rank
from pcomm.nvls.collectives.ragged import all_gather_v as all_gather_v
from pcomm.nvls.collectives.ragged import reduce_scatter_v as reduce_scatter_v
from pcomm.nvls.collectives.reductions import all_reduce as all_reduce
from pcomm.nvls.collectives.reductions import reduce_scatter_tensor as reduce_scatter_tensor
from pcomm.nvls.operators import WorkspaceOperators as WorkspaceOperators
from pcomm.nvls.torch_backend import NvlsProcessGroup as NvlsProcessGroup
from pcomm.nvls.torch_backend import register_backend as register_backend
from pcomm.nvls.workspace.workspace import Workspace as Workspace

__version__: str
