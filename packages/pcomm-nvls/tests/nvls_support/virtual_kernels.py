"""The kernels with all ranks in one launch: the second index of the grid is the rank.

Each rank has its buffer, its input, its result and its words; the way is that to peers.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.kernels.fused_rmsnorm import all_reduce_add_rmsnorm_kernel
from pcomm.nvls.kernels.gathers import all_gather_kernel
from pcomm.nvls.kernels.reductions import (
    one_shot_all_reduce_kernel,
    reduce_scatter_kernel,
    two_shot_all_reduce_kernel,
)

__all__ = [
    "norm_alone_kernel",
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


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "row_vectors", "inverse_hidden", "eps"]
)
def norm_alone_kernel(
    residual: tl.tensor,
    weight: tl.tensor,
    new_residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    row_vectors: tl.tensor,
    inverse_hidden: tl.tensor,
    eps: tl.tensor,
    buffers: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    slot: tl.tensor,
    limit_ns: tl.tensor,
    KIND: tl.constexpr,
    EPOCHS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`all_reduce_add_rmsnorm_kernel` of many groups of one rank, whose addends are in the slot.

    So the blocks are as many as a GPU has place for, and each byte is moved once: what is left is
    the norm and the memory.

    Args:
        residual: Address of the residual of all groups, one behind the other.
        weight: Address of the weight of the norm: one row.
        new_residual: Address of the sums, as `residual`.
        out: Address of the normed rows, as `residual`.
        num_rows: Number of rows of a group.
        row_vectors: Size of a row, in 16 bytes; at most `BLOCK`.
        inverse_hidden: 1 over the length of a row, in numbers.
        eps: Number that is added to the mean square.
        buffers: Table of the addresses of the groups' buffers.
        epochs: Words of all groups, one group after another.
        failure: Address of a word for the host, as in `barrier`.
        slot: Byte offset of the addends in a buffer.
        limit_ns: Longest wait.
        KIND: "bf16", "fp16" or "fp32".
        EPOCHS: Number of words of a group.
        BLOCK: Number of vectors of a row that a block has place for.
    """
    group = tl.program_id(1)
    begin = group.to(tl.int64) * num_rows * row_vectors * 16
    all_reduce_add_rmsnorm_kernel(
        residual, residual + begin, weight, new_residual + begin, out + begin, num_rows,
        row_vectors, inverse_hidden, eps, buffers + group, failure, epochs + group * EPOCHS,
        failure, slot, limit_ns, group * 0, 1, KIND, "peers", False, True, False, BLOCK,
    )  # fmt: skip
