from pcomm.nvls._capability import Capability as Capability
from pcomm.nvls._capability import capability as capability
from pcomm.nvls._nvls_collectives import nvls_collectives as nvls_collectives
from pcomm.nvls._self_test import self_test as self_test
from pcomm.nvls.collectives.all_gather_coalesced import all_gather_coalesced as all_gather_coalesced
from pcomm.nvls.collectives.all_gather_into_tensor import (
    all_gather_into_tensor as all_gather_into_tensor,
)
from pcomm.nvls.collectives.all_gather_v import all_gather_v as all_gather_v
from pcomm.nvls.collectives.all_reduce import all_reduce as all_reduce
from pcomm.nvls.collectives.all_reduce_add_rmsnorm import (
    all_reduce_add_rmsnorm as all_reduce_add_rmsnorm,
)
from pcomm.nvls.collectives.gather_to_rank import gather_to_rank as gather_to_rank
from pcomm.nvls.collectives.reduce_scatter_add_rmsnorm_all_gather import (
    reduce_scatter_add_rmsnorm_all_gather as reduce_scatter_add_rmsnorm_all_gather,
)
from pcomm.nvls.collectives.reduce_scatter_tensor import (
    reduce_scatter_tensor as reduce_scatter_tensor,
)
from pcomm.nvls.collectives.reduce_scatter_v import reduce_scatter_v as reduce_scatter_v
from pcomm.nvls.operators import WorkspaceOperators as WorkspaceOperators
from pcomm.nvls.workspace.workspace import Workspace as Workspace

__version__: str
