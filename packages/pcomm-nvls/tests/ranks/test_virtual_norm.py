"""The norm of groups of one rank, as the benchmark of one GPU launches it, under emulation."""

from __future__ import annotations

import torch

from nvls_support.emulation import emulate
from pcomm.core.testing import ranks
from pcomm.nvls.references import rms_norm


@ranks(1)
def test_each_group_norms_the_rows_of_its_own_addends(rank: int) -> None:
    emulate()
    from nvls_support.virtual_ranks import VirtualRanks

    for dtype in (torch.bfloat16, torch.float32):
        size, each, hidden = 3, 5, 136
        virtual = VirtualRanks(size, each * hidden * 4, device=torch.device("cpu"))
        addends = torch.randint(-9, 10, (size, each, hidden)).to(dtype)
        residual = torch.randint(-9, 10, (size * each, hidden)).to(dtype)
        weight = torch.randn(hidden).to(dtype)
        for place in range(size):
            virtual.addends(place, (each, hidden), dtype).copy_(addends[place])
        out, stream = torch.empty_like(residual), torch.empty_like(residual)
        virtual.run(virtual.launch_norm(out, stream, residual, weight, 1e-5, num_blocks=2))
        wanted = residual + addends.flatten(0, 1)
        assert torch.equal(stream, wanted)
        assert torch.equal(out, rms_norm(wanted, weight, 1e-5))
        assert virtual.failure.item() == 0
        virtual.close()
