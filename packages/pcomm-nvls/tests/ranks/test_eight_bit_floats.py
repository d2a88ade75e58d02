"""Gathers of 8-bit floats by kernels and by torch.distributed, which on gloo has no such type."""

from __future__ import annotations

import torch

from nvls_support.emulation import opened
from pcomm import nvls
from pcomm.core.testing import ranks


@ranks(2)
def test_gathers_of_any_size_move_eight_bit_floats(rank: int) -> None:
    all_bytes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x, both = all_bytes[4 * rank :][:4].contiguous().view(dtype), all_bytes
        with opened(1 << 14) as workspace:
            for algo in ("p2p", "dist"):
                named = {"workspace": workspace, "algo": algo}
                out = torch.empty(8, 32, dtype=dtype)
                wide = nvls.all_gather_into_tensor(x, dim=-1, **named)
                counts = torch.full((2,), 4, dtype=torch.int32)
                found = [
                    nvls.all_gather_into_tensor(x, out=out, **named),
                    *nvls.all_gather_coalesced([x], outs=[None], **named),
                    nvls.all_gather_v(x, [4, 4], **named),
                    nvls.all_gather_v(x, counts, **named)[:8],
                ]
                here = nvls.gather_to_rank(x, destination=1, **named)
                assert (here is None) == (rank == 0)
                found += [here] if here is not None else []
                for one in found:
                    assert one.dtype == dtype
                    assert torch.equal(one.view(torch.uint8), both)
                halves = torch.cat([both[:4], both[4:]], 1)
                assert torch.equal(wide.view(torch.uint8), halves)
