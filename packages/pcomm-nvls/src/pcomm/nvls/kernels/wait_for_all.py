"""A barrier of all ranks and nothing else."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.barrier import barrier

__all__ = ["wait_for_all_kernel"]


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def wait_for_all_kernel(
    buffers: tl.tensor,
    multicast: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    WAY: tl.constexpr,
) -> None:
    """See `barrier` for the arguments; one block."""
    block = tl.program_id(0)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
