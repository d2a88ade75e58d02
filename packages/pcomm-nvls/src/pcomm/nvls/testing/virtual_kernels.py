"""The kernels with all ranks in one launch: the second index of the grid is the rank.

Each rank has its buffer, its input, its result and its words; the way is that to peers.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.all_gather import all_gather_kernel
from pcomm.nvls.kernels.all_reduce import one_shot_all_reduce_kernel, two_shot_all_reduce_kernel
from pcomm.nvls.kernels.reduce_scatter import reduce_scatter_kernel

__all__ = [
    "virtual_all_gather_kernel",
    "virtual_all_reduce_kernel",
    "virtual_reduce_scatter_kernel",
]


@triton.jit(do_not_specialize=["num_vectors", "row_vectors"])  # type: ignore[untyped-decorator]
def virtual_all_gather_kernel(
    xs: tl.tensor,
    outs: tl.tensor,
    num_vectors: tl.tensor,
    row_vectors: tl.tensor,
    buffers: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    WORLD: tl.constexpr,
    EPOCHS: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`all_gather_kernel` of each rank.

    Args:
        xs: Table of the addresses of the ranks' shards.
        outs: Table of the addresses of their results.
        num_vectors: Size of a shard, in 16 bytes.
        row_vectors: Size of a row of a shard, in 16 bytes.
        buffers: Table of the addresses of the ranks' buffers.
        epochs: Words of all ranks, one rank after another.
        failure: Address of a word for the host, as in `barrier`.
        slot: Byte offset of the slot in a buffer.
        limit_ns: Longest wait for a rank.
        WORLD: Number of ranks.
        EPOCHS: Number of words of a rank.
        ENTRY: True where the operation before may have used the same slot.
        BLOCK: Number of vectors that a block moves at a time.
    """
    rank = tl.program_id(1)
    all_gather_kernel(
        tl.load(xs + rank),
        tl.load(outs + rank),
        num_vectors,
        row_vectors,
        buffers,
        failure,
        epochs + rank * EPOCHS,
        failure,
        slot,
        limit_ns,
        rank,
        WORLD,
        "peers",
        ENTRY,
        True,
        BLOCK,
    )


@triton.jit(do_not_specialize=["num_vectors", "row_vectors"])  # type: ignore[untyped-decorator]
def virtual_reduce_scatter_kernel(
    xs: tl.tensor,
    outs: tl.tensor,
    num_vectors: tl.tensor,
    row_vectors: tl.tensor,
    buffers: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    EPOCHS: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`reduce_scatter_kernel` of each rank; arguments as those of `virtual_all_gather_kernel`."""
    rank = tl.program_id(1)
    reduce_scatter_kernel(
        tl.load(xs + rank),
        tl.load(outs + rank),
        num_vectors,
        row_vectors,
        buffers,
        failure,
        epochs + rank * EPOCHS,
        failure,
        slot,
        limit_ns,
        rank,
        WORLD,
        "peers",
        KIND,
        ENTRY,
        False,
        BLOCK,
    )


@triton.jit(do_not_specialize=["num_vectors"])  # type: ignore[untyped-decorator]
def virtual_all_reduce_kernel(
    xs: tl.tensor,
    outs: tl.tensor,
    num_vectors: tl.tensor,
    buffers: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    EPOCHS: tl.constexpr,
    ENTRY: tl.constexpr,
    SHOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """An all-reduce of each rank, in one step or two by `SHOTS`.

    The other arguments are as those of `virtual_all_gather_kernel`.
    """
    rank = tl.program_id(1)
    x, out = tl.load(xs + rank), tl.load(outs + rank)
    words = epochs + rank * EPOCHS
    if SHOTS == 1:
        one_shot_all_reduce_kernel(
            x, out, num_vectors, buffers, failure, words, failure, slot, limit_ns, rank,
            WORLD, "peers", KIND, ENTRY, False, BLOCK,
        )  # fmt: skip
    else:
        two_shot_all_reduce_kernel(
            x, out, num_vectors, buffers, failure, words, failure, slot, limit_ns, rank,
            WORLD, "peers", KIND, ENTRY, False, BLOCK,
        )  # fmt: skip
