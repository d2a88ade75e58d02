"""Mappings between replicated and split activations, forward and backward.

Inside a tensor-parallel layer a value is *replicated* (the same on all ranks, its loss counted
once), *partial* (the ranks' values add up), or *split* (each rank has some tokens or columns).
A mapping is linear, and its backward the transpose under that reading, which is again one of
them: they come in pairs, and so derivatives of any order are right.

| mapping | forward | backward |
|---|---|---|
| `enter` replicated -> used by every rank | nothing | `leave` |
| `leave` partial -> replicated | all-reduce | `enter` |
| `gather_tokens` split -> used by every rank | all-gather | `scatter_tokens` |
| `scatter_tokens` partial -> split | reduce-scatter | `gather_tokens` |
| `gather_replicated` split -> replicated | all-gather | `split_replicated` |
| `split_replicated` replicated -> split | own shard | `gather_replicated` |

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

# Shape suffixes: T tokens, D columns; x_t is one rank's shard of x_T.

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.checks import check_rank_order
from pcomm.core.tensor_parallel.param_layout import take_shard

__all__ = [
    "add_up",
    "enter",
    "gather_replicated",
    "gather_tokens",
    "leave",
    "scatter_tokens",
    "split_replicated",
]


def enter(x: Tensor, collectives: Collectives) -> Tensor:
    """`x`, replicated, into a computation that every rank does in part. Collective in backward."""
    return with_adjoint(x, lambda x: x, lambda gradient: leave(gradient, collectives))


def leave(x: Tensor, collectives: Collectives) -> Tensor:
    """The sum of the ranks' partial results, replicated. Collective in forward."""
    return with_adjoint(x, collectives.all_reduce, lambda gradient: enter(gradient, collectives))


def gather_tokens(x_tD: Tensor, collectives: Collectives) -> Tensor:
    """All tokens `[T, D]` from each rank's shard `[T / size, D]`. Collective both ways."""
    return with_adjoint(
        x_tD, collectives.all_gather, lambda gradient: scatter_tokens(gradient, collectives)
    )


def scatter_tokens(x_TD: Tensor, collectives: Collectives) -> Tensor:
    """This rank's tokens of the sum of partial results. Collective both ways."""
    return with_adjoint(
        x_TD, collectives.reduce_scatter, lambda gradient: gather_tokens(gradient, collectives)
    )


def gather_replicated(
    x: Tensor, layout: Layout, collectives: Collectives, *, dim: int = -1
) -> Tensor:
    """The whole tensor, replicated, from each rank's shard. Collective in forward.

    Args:
        x: This rank's shard, of any shape.
        layout: Layout of `dim`, whose shards lie in rank order.
        collectives: Collectives of the group that shares the tensor.
        dim: Dimension that is split: the last one, of columns, or 0, of tokens.

    Raises:
        LayoutError: The layout's shards do not lie in rank order.
    """
    check_rank_order("gather_replicated", layout)
    return with_adjoint(
        x,
        lambda x: collectives.all_gather(x, dim=dim, sizes=layout.sizes),
        lambda gradient: split_replicated(gradient, layout, collectives, dim=dim),
    )


def split_replicated(
    x: Tensor, layout: Layout, collectives: Collectives, *, dim: int = -1
) -> Tensor:
    """This rank's shard of a replicated tensor, a view where it can be. Collective in backward.

    Args:
        x: The whole tensor, the same on all ranks.
        layout: Layout of `dim`, whose shards lie in rank order.
        collectives: Collectives of the group that shares the tensor.
        dim: Dimension that is split: the last one, of columns, or 0, of tokens.

    Raises:
        LayoutError: The layout's shards do not lie in rank order.
    """
    check_rank_order("split_replicated", layout)
    return with_adjoint(
        x,
        lambda x: take_shard(x, layout, collectives.rank, dim=dim),
        lambda gradient: gather_replicated(gradient, layout, collectives, dim=dim),
    )


def add_up(x: Tensor, collectives: Collectives, *, scatters_tokens: bool) -> Tensor:
    """What `leave` or `scatter_tokens` returns, where no gradient is recorded. Collective.

    On a CPU the sum for a token does not depend on how many others there are. Gloo's all-reduce
    adds up each element in an order that depends on its place, which two ranks cannot tell apart.

    Args:
        x: Partial results of this rank; overwritten by an all-reduce.
        collectives: Collectives of the tensor-parallel group.
        scatters_tokens: True for this rank's tokens alone.

    Raises:
        LayoutError: The ranks cannot get equal numbers of the tokens; on all ranks, before any
            communication.
    """
    if not scatters_tokens:
        if x.is_cpu and collectives.size > 2:
            return _sum_in_rank_order(x, collectives)
        return collectives.all_reduce(x, out=x)
    if x.shape[0] % collectives.size:
        raise LayoutError(
            f"a layer with sequence_parallel=True, without gradients: {x.shape[0]} tokens",
            found=f"{collectives.size} ranks",
            why="Each rank gets as many tokens as every other, and the next layer cannot see how "
            "many the others have.",
            fix="Build the layers that decode with sequence_parallel=False: their weights are the "
            "same, and they take any number of tokens.",
        )
    return collectives.reduce_scatter(x)


def _sum_in_rank_order(x: Tensor, collectives: Collectives) -> Tensor:
    parts = collectives.all_gather(x.unsqueeze(0)).unbind(0)
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)
