"""All ranks in one launch: that such kernels compile, and keep the rules of the others."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from nvls_support.compiled import accesses, compile_kernel, problems_of
from nvls_support.virtual_ranks import Operation, VirtualRanks


@pytest.mark.parametrize(
    ("operation", "barriers"),
    [("all_gather", 1), ("reduce_scatter", 1), ("one_shot", 1), ("two_shot", 2)],
)
def test_ranks_of_one_launch_wait_for_each_other(operation: Operation, barriers: int) -> None:
    ranks = VirtualRanks(4, 1 << 16, device=torch.device("cpu"))
    xs = [torch.zeros(1024, dtype=torch.bfloat16) for _ in range(4)]
    outs = [torch.zeros(4096, dtype=torch.bfloat16) for _ in range(4)]
    launch = ranks.launch(operation, outs, xs)
    made = compile_kernel(launch.kernel, launch.arguments, 90, num_warps=launch.num_warps)
    # Two tables are read in addition: those of the inputs and of the results.
    assert problems_of(made.ptx, barriers=barriers) == ()
    assert "%ctaid.y" in made.ptx
    found = accesses(made.ptx)
    assert found["st.release.sys.global.u32"] == 2 * barriers  # a signal, and a failure
    assert not [name for name in found if name.startswith("multimem")]
    ranks.close()


def test_the_norm_of_groups_of_one_rank_compiles() -> None:
    ranks = VirtualRanks(4, 1 << 16, device=torch.device("cpu"))
    rows = [torch.zeros(16, 2048, dtype=torch.bfloat16) for _ in range(3)]
    weight = torch.zeros(2048, dtype=torch.bfloat16)
    launch = ranks.launch_norm(*rows, weight, 1e-6)
    for capability in (90, 100):
        made = compile_kernel(
            launch.kernel, launch.arguments, capability, num_warps=launch.num_warps
        )
        assert problems_of(made.ptx, barriers=1) == ()
        # Addends, residual and weight; stream and norm.
        found = accesses(made.ptx)
        assert found["ld.relaxed.sys.global.v4.b32"] == 1
        assert found["ld.global.v4.b32"] == 2
        assert found["st.global.v4.b32"] == 2
    ranks.close()
