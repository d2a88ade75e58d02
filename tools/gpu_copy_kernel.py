"""The copy loop of the kernels of pcomm-nvls alone: all loads of a turn are issued before a store.

It stands in a file of its own since Triton reads the source of a kernel from its file.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import get, put

__all__ = ["copy_kernel"]


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(x: tl.tensor, out: tl.tensor, num_vectors: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Copy 16 bytes at a time; `BLOCK` is a multiple of the threads, as many times as in flight."""
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, num_vectors, step):
        index = (start + lanes).to(tl.int64)
        inside = index < num_vectors
        w0, w1, w2, w3 = get(x.to(tl.int64) + index * 16, inside)
        put(out.to(tl.int64) + index * 16, w0, w1, w2, w3, inside)
