"""Token embedding whose rows are split over the ranks."""

# Shape suffixes: T tokens, V vocabulary, D width; t, v one rank's shard.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.checks import (
    check_ids,
    check_partition,
    check_rank_order,
    empty_parameters,
    first_position,
    take_parameters,
)
from pcomm.core.tensor_parallel.fast_module import FastModule
from pcomm.core.tensor_parallel.mappings import add_up, leave, scatter_tokens
from pcomm.core.tensor_parallel.param_layout import ParamLayout

__all__ = ["VocabularyParallelEmbedding"]


class VocabularyParallelEmbedding(FastModule):
    """Rows of a table, looked up on the rank that holds them and summed over all.

    On one rank this is `F.embedding` and nothing else. Otherwise collective: an all-reduce, or
    a reduce-scatter of tokens under sequence parallelism. Where no gradient is recorded the
    all-reduce is in place, without an `autograd.Function`.

    Args:
        layout: Layout of the V rows, in rank order.
        width: D, the number of columns.
        collectives: Collectives of the tensor-parallel group, without gradients.
        sequence_parallel: True if the output is this rank's shard of the tokens.
        check_ids: False trusts that ids are in the layout, for a caller that has checked them; one
            that is not gives a row of zeros.
        initialise: False allocates this rank's rows alone and leaves them as the memory was, for
            weights that are loaded; otherwise the whole table is allocated first.
        device: Device of the table.
        dtype: Data type of the table.

    Shape: `[T]` int64, the same on all ranks, to `[T, D]`, or `[T / size, D]` under sequence
    parallelism. Table `[v, D]`.

    Raises:
        LayoutError: The layout is over another number of ranks, or not in rank order; when
            called, an id outside it (on a GPU a device assertion instead).
    """

    weight: nn.Parameter

    def __init__(
        self,
        layout: Layout,
        width: int,
        collectives: Collectives,
        *,
        sequence_parallel: bool = False,
        check_ids: bool = True,
        initialise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_partition("VocabularyParallelEmbedding", layout, collectives)
        check_rank_order("VocabularyParallelEmbedding", layout)
        self.layout, self.collectives = layout, collectives
        self.param_layouts = {"weight": ParamLayout(layout)}
        if initialise:
            whole = nn.Embedding(layout.length, width, device=device, dtype=dtype)
            take_parameters(self, whole, collectives.rank)
        else:
            shapes = {"weight": (layout.length, width)}
            empty_parameters(self, shapes, collectives.rank, device=device, dtype=dtype)
        if collectives.size == 1:
            self.run = _embedding
            return
        self._first = first_position(layout, collectives.rank)
        self._leave = scatter_tokens if sequence_parallel else leave
        self._scatters_tokens, self._checks_ids = sequence_parallel, check_ids
        self.run = type(self)._split

    def _split(self, ids_T: Tensor) -> Tensor:
        if self._checks_ids:
            check_ids("VocabularyParallelEmbedding", ids_T, self.layout)
        rows = self._own_rows(ids_T)
        if torch.is_grad_enabled():
            return self._leave(rows, self.collectives)
        return add_up(rows, self.collectives, scatters_tokens=self._scatters_tokens)

    def _own_rows(self, ids_T: Tensor) -> Tensor:
        """Rows that this rank holds, zero for tokens of other ranks."""
        table_vD = self.weight
        if not table_vD.shape[0]:
            # No row to look up, but still a part of the graph: the other ranks' backward waits.
            return table_vD.sum() + table_vD.new_zeros(*ids_T.shape, table_vD.shape[1])
        local_T = ids_T - self._first
        is_other_T = (local_T < 0) | (local_T >= table_vD.shape[0])
        rows_TD = F.embedding(local_T.masked_fill(is_other_T, 0), table_vD)
        return rows_TD.masked_fill(is_other_T.unsqueeze(-1), 0.0)


def _embedding(module: VocabularyParallelEmbedding, ids_T: Tensor) -> Tensor:
    try:
        return F.embedding(ids_T, module.__dict__["_parameters"]["weight"])
    except KeyError:
        # A parametrization has put something else in its place.
        return F.embedding(ids_T, module.weight)
