"""The operators of torch: compiled like called, checked by torch's own `opcheck`, no gradients."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn

from nvls_support.emulation import opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.errors import ClosedError, LayoutError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.testing import assert_equal, ranks
from pcomm.core.testing.on_ranks import default_group

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


class Layer(nn.Module):
    """A row-parallel product between two parts of a sequence-parallel stream."""

    def __init__(self, operators: object) -> None:
        super().__init__()
        self.operators: object = operators
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.operators.all_gather(x) @ self.weight  # type: ignore[attr-defined]
        shard = self.operators.reduce_scatter(whole).relu() + x  # type: ignore[attr-defined]
        columns = self.operators.all_gather(shard, -1)  # type: ignore[attr-defined]
        total = self.operators.all_reduce(columns) * 2  # type: ignore[attr-defined]
        fused = self.operators.reduce_scatter_add_rmsnorm_all_gather  # type: ignore[attr-defined]
        rows, stream = fused(whole, shard, self.weight[0], 1e-5)
        fused = self.operators.all_reduce_add_rmsnorm  # type: ignore[attr-defined]
        normed, residual = fused(rows, whole, self.weight[1], 1e-5)
        return torch.cat([total.view(-1), stream.view(-1), normed.view(-1), residual.view(-1)])


@ranks(2, leaves="tqdm's monitor, which torch.compile starts, lives as long as the process")
def test_a_compiled_layer_equals_the_layer(rank: int) -> None:
    group = Group.from_process_group("tp", default_group())
    with opened(1 << 14) as workspace, torch.no_grad():
        layer = Layer(nvls.WorkspaceOperators(workspace))
        inner = group.collectives
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (2, 6):
            x = torch.arange(rows * 8.0).view(rows, 8) / 16 + rank
            found = layer(x)
            shard = inner.reduce_scatter(inner.all_gather(x) @ layer.weight).relu() + x
            expected = inner.all_reduce(inner.all_gather(shard, dim=-1)) * 2
            assert_equal(found[: expected.numel()].view(expected.shape), expected)
            before = workspace.num_launches
            assert_equal(compiled(x), found)
            # Fake tensors launch nothing.
            assert workspace.num_launches == before + 6
        operators = torch.ops.pcomm_nvls
        number = layer.operators.number
        x = torch.arange(16.0).view(4, 4)
        refused(LayoutError, f"workspace {number} of 2 ranks", operators.all_reduce, x, number, 3)
        with torch.enable_grad(), pytest.raises(UnsupportedError, match="gradient is recorded"):
            operators.all_reduce(x.clone().requires_grad_(), number, 2)
        with torch.enable_grad(), pytest.raises(Exception, match="gradient is recorded"):
            compiled(x.view(2, 8))
    refused(ClosedError, "the workspace is closed", operators.all_reduce, x, number, 2)
    del workspace, layer, compiled
    torch._dynamo.reset()
    gc.collect()
    refused(ClosedError, "no workspace of that number", operators.all_reduce, x, number, 2)


def test_one_rank_alone_gets_a_tensor_of_its_own() -> None:

    x = torch.arange(8.0)
    with nvls.Workspace(Group("tp", (0,), None), 4096) as workspace:
        operators = nvls.WorkspaceOperators(workspace)
        for result in (
            operators.all_gather(x),
            operators.reduce_scatter(x),
            operators.all_reduce(x),
        ):
            assert_equal(result, x)
            assert result.data_ptr() != x.data_ptr()


def test_torch_finds_nothing_wrong_with_them() -> None:

    x = torch.arange(16.0).view(4, 4)
    with nvls.Workspace(Group("tp", (0,), None), 4096) as workspace:
        operators, number = torch.ops.pcomm_nvls, nvls.WorkspaceOperators(workspace).number
        for checked in (x, x.t(), x.bfloat16(), x.long()):
            dims = (checked, number, 1, 1)
            torch.library.opcheck(operators.all_gather.default, dims, test_utils=CHECKS)
            torch.library.opcheck(operators.reduce_scatter.default, dims, test_utils=CHECKS)
            torch.library.opcheck(operators.all_reduce.default, dims[:3], test_utils=CHECKS)
        rows = torch.ones(2, 8)
        for fused in (
            operators.all_reduce_add_rmsnorm,
            operators.reduce_scatter_add_rmsnorm_all_gather,
        ):
            arguments = (rows.clone(), rows.clone(), rows[0].clone(), 1e-5, number, 1)
            torch.library.opcheck(fused.default, arguments, test_utils=CHECKS)


def test_copies_use_the_same_workspace_and_pickles_none() -> None:
    """In another process its number is that of another workspace."""

    x = torch.ones(8)
    with nvls.Workspace(Group("tp", (0,), None), 4096) as workspace:
        module = nn.Linear(8, 8)
        module.workspace, module.operators = workspace, nvls.WorkspaceOperators(workspace)
        copied = copy.deepcopy(module)
        assert copied.workspace is workspace
        assert copied.operators.number == module.operators.number
        assert_equal(copied.operators.all_reduce(x), x)
        refused(UnsupportedError, "pickle: WorkspaceOperators", pickle.dumps, module.operators)
