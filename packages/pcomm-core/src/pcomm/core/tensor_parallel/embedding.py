"""Token embedding whose rows are split over the ranks."""

# Shape suffixes: T tokens, V vocabulary, D width; t, v one rank's share.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.placement import Placement
from pcomm.core.tensor_parallel.direct import DirectModule
from pcomm.core.tensor_parallel.linear import check_ranks, take_parameters
from pcomm.core.tensor_parallel.regions import leave, scatter_tokens

__all__ = ["VocabularyParallelEmbedding", "first_position"]


class VocabularyParallelEmbedding(DirectModule):
    """Rows of a table, looked up on the rank that holds them and summed over all.

    On one rank this is `F.embedding` and nothing else. Otherwise collective: an all-reduce, or
    a reduce-scatter of tokens under sequence parallelism.

    Args:
        layout: Which rank holds which of the V rows, in rank order.
        width: D.
        collectives: Of the tensor-parallel group, without gradients.
        sequence_parallel: Whether the output is this rank's share of the tokens.
        device: Where the table is.
        dtype: Of the table.

    Shape: `[T]` int64, the same on all ranks, to `[T, D]`, or `[T / size, D]` under sequence
    parallelism. Table `[v, D]`.

    Raises:
        LayoutError: The layout is over another number of ranks, or not in rank order.
    """

    def __init__(
        self,
        layout: Layout,
        width: int,
        collectives: Collectives,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_ranks("VocabularyParallelEmbedding", layout, collectives)
        self.layout, self.collectives = layout, collectives
        self.placements = {"weight": Placement(layout)}
        whole = nn.Embedding(layout.length, width, device=device, dtype=dtype)
        take_parameters(self, whole, collectives.rank)
        if collectives.size == 1:
            self.run = self._alone
            return
        self._first = first_position("VocabularyParallelEmbedding", layout, collectives.rank)
        self._leave = scatter_tokens if sequence_parallel else leave
        self.run = self._split

    def _alone(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self._parameters["weight"])  # type: ignore[arg-type]

    def _split(self, ids_T: Tensor) -> Tensor:
        return self._leave(self._own_rows(ids_T), self.collectives)

    def _own_rows(self, ids_T: Tensor) -> Tensor:
        """Rows that this rank holds, zero for tokens of other ranks."""
        table_vD: Tensor = self._parameters["weight"]  # type: ignore[assignment]
        if not table_vD.shape[0]:
            return table_vD.sum() + table_vD.new_zeros(*ids_T.shape, table_vD.shape[1])
        local_T = ids_T - self._first
        is_other_T = (local_T < 0) | (local_T >= table_vD.shape[0])
        rows_TD = F.embedding(local_T.masked_fill(is_other_T, 0), table_vD)
        return rows_TD.masked_fill(is_other_T.unsqueeze(-1), 0.0)


def first_position(layer: str, layout: Layout, rank: int) -> int:
    """The first position that `rank` holds of a layout that must lie in rank order."""
    if not layout.is_contiguous:
        raise LayoutError(
            f"{layer}: {layout.describe()}",
            found="rows that do not lie one after another in rank order",
            why="A token's row is found by subtracting the first row of the rank.",
            fix="Use Layout.even or Layout.balanced for the vocabulary.",
        )
    return sum(layout.sizes[:rank])
