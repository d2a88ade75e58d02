"""Two processes that share one GPU: kernels between address spaces, eager and replayed.

Torch lets two ranks map memory of one device for this purpose, and gives them no multicast. The
device takes turns between the processes, so times mean nothing.
"""

from __future__ import annotations

import os

import pytest
import torch

from nvls_support.emulation import emulate
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology


@ranks(2)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("cpu", id="two processes on the CPU"),
        pytest.param(
            "cuda",
            id="two processes on one GPU",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
            ],
        ),
    ],
)
def test_gathers_and_sums_between_address_spaces(rank: int, kind: str) -> None:
    if kind == "cpu":
        emulate()
    else:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0)
    from pcomm.nvls._self_test import self_test
    from pcomm.nvls.collectives.gathers import all_gather_into_tensor
    from pcomm.nvls.collectives.reductions import all_reduce
    from pcomm.nvls.workspace.workspace import Workspace

    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    with (
        open_groups(Topology({"tp": 2}), ["tp"]) as groups,
        Workspace(groups["tp"], 1 << 16, device=device, timeout_s=60.0) as workspace,
    ):
        assert workspace.memory is not None, workspace.capability
        if kind == "cuda":
            report = self_test(workspace)
            assert "broken" not in {one.status for one in report.findings}, report.as_text()
        x = torch.zeros(512, device=device)

        def step() -> list[torch.Tensor]:
            sums = [
                all_reduce(x=x, out=None, workspace=workspace, algo=algo)
                for algo in ("lamport", "p2p")
            ]
            whole = all_gather_into_tensor(
                x=sums[0] + rank, out=None, workspace=workspace, algo="lamport"
            )
            return [*sums, whole]

        def check(found: list[torch.Tensor], number: int) -> None:
            total = 2.0 * number + 1
            assert [one.unique().tolist() for one in found[:2]] == [[total], [total]]
            assert found[2].view(2, -1).unique(dim=1).flatten().tolist() == [total, total + 1]
            workspace.check()

        for number in range(4):
            x.fill_(number + rank)
            check(step(), number)
        if kind == "cpu":
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            workspace.streams.follow()
            recorded = step()
        for number in range(4, 12):
            x.fill_(number + rank)
            graph.replay()
            check(recorded, number)
