"""Borders between replicated and split activations, forward and backward.

Inside a tensor-parallel layer a value is *replicated* (the same on all ranks, its loss counted
once), *partial* (the ranks' values add up), or *split* (each rank has some tokens or columns).
A border is a linear map, its backward the transpose under that reading:

| border | forward | backward |
|---|---|---|
| `enter` replicated -> used by every rank | nothing | all-reduce |
| `leave` partial -> replicated | all-reduce | nothing |
| `gather_tokens` split -> used by every rank | all-gather | reduce-scatter |
| `scatter_tokens` partial -> split | reduce-scatter | all-gather |
| `gather_columns` split -> replicated | all-gather | own part |

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

# Shape suffixes: T tokens, D columns; x_t is one rank's share of x_T.

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.placement import take_shard

__all__ = ["enter", "gather_columns", "gather_tokens", "leave", "scatter_tokens"]


def enter(x: Tensor, collectives: Collectives) -> Tensor:
    """`x`, replicated, into a computation that every rank does in part. Collective in backward."""
    return with_adjoint(x, lambda x: x, collectives.all_reduce)


def leave(x: Tensor, collectives: Collectives) -> Tensor:
    """The sum of the ranks' partial results, replicated. Collective in forward."""
    return with_adjoint(x, collectives.all_reduce, lambda gradient: gradient)


def gather_tokens(x_tD: Tensor, collectives: Collectives) -> Tensor:
    """All tokens `[T, D]` from each rank's share `[T / size, D]`. Collective both ways."""
    return with_adjoint(x_tD, collectives.all_gather, collectives.reduce_scatter)


def scatter_tokens(x_TD: Tensor, collectives: Collectives) -> Tensor:
    """This rank's tokens of the sum of partial results. Collective both ways."""
    return with_adjoint(x_TD, collectives.reduce_scatter, collectives.all_gather)


def gather_columns(x: Tensor, layout: Layout, collectives: Collectives) -> Tensor:
    """All columns, replicated, from each rank's part by `layout`. Collective in forward.

    Raises:
        LayoutError: The layout's parts do not lie in rank order.
    """
    if not layout.is_contiguous:
        raise LayoutError(
            f"gather_columns: {layout.describe()}",
            found="parts that do not lie one after another in rank order",
            why="A gather joins the ranks' columns in rank order.",
            fix="Keep the output split, or use a layout with one run a rank.",
        )
    return with_adjoint(
        x,
        lambda x: collectives.all_gather(x, dim=-1, sizes=layout.sizes),
        lambda gradient: take_shard(gradient, layout, collectives.rank, dim=-1),
    )
