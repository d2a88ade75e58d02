"""The kernels on a GPU against torch on the same GPU; never run yet, because no GPU was at hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcomm.core.testing.assertions import assert_close, assert_equal
from pcomm.gdn_cp import AttentionSpec, GdnSpec, HeadShare, Mamba2Spec, Spec
from pcomm.gdn_cp.ops.backend import choose_packing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
CASES = [
    pytest.param(GdnSpec(16, 32, 128, 128), 4, id="Qwen3-Next on 4 ranks"),
    pytest.param(GdnSpec(16, 32, 128, 128), 32, id="Qwen3-Next on 32 ranks, with copies"),
    pytest.param(Mamba2Spec(24, 64, 1, 128), 8, id="Mamba-2 on 8 ranks, with copies"),
    pytest.param(AttentionSpec(6, 6, 37), 3, id="odd widths"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 1000])
@pytest.mark.parametrize(("spec", "size"), CASES)
def test_kernels_are_equal_to_torch(spec: Spec, size: int, rows: int, dtype: torch.dtype) -> None:
    kernels = choose_packing(CUDA, dtype, wanted="triton").packing
    reference = choose_packing(CUDA, dtype, wanted="torch").packing
    shares = HeadShare(spec, size, 0).sections
    shards = [share.columns for share in shares]
    # Stretches of one projection, so that rows are further apart than they are long.
    widths = [share.section.width for share in shares]
    sections = torch.randn(rows, sum(widths), device=CUDA).to(dtype).split(widths, 1)
    message = kernels.pack_sections(sections, shards)
    assert_equal(message, reference.pack_sections(sections, shards))

    order = torch.randperm(size * rows, device=CUDA)
    parts = message.split([share.width for share in shares], 1)
    for rows_of in ([message], list(parts), [x.t().contiguous().t() for x in parts]):
        assert_equal(kernels.take_rows(rows_of, order), message.index_select(0, order))
        assert_equal(kernels.take_rows(rows_of, None), message)

    arrived = torch.randn(message.shape, device=CUDA).to(dtype)
    found = kernels.unpack_sections(arrived, shards)
    again = kernels.unpack_sections(arrived, shards)
    plain = reference.unpack_sections(arrived, shards)
    for share, mine, repeated, expected in zip(shares, found, again, plain, strict=True):
        assert_equal(mine, repeated)
        # Both add the copies in fp32 at least, perhaps in another order, and round once.
        assert_close(mine, expected, num_terms=share.copies if share.copies > 1 else 0)


def test_rows_beyond_the_reach_of_32_bits() -> None:
    rows, width = 70_000, 32_768
    needed = 3 * rows * width * 2
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free memory")
    x = torch.empty(rows, width, device=CUDA, dtype=torch.bfloat16)
    x.copy_(torch.arange(rows, device=CUDA)[:, None] % 251)
    order = torch.arange(rows, device=CUDA).flip(0)

    def taken(part: Tensor) -> Tensor:
        packing = choose_packing(CUDA, part.dtype, wanted="triton").packing
        return packing.take_rows([part], order)

    assert_equal(taken(x), x.index_select(0, order))
