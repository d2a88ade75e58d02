"""A model of split layers."""

from __future__ import annotations

from torch import Tensor, nn

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)


class SplitModel(nn.Module):
    """Every layer in one mode, from token ids to a loss per token."""

    def __init__(
        self,
        collectives: Collectives,
        *,
        width: int = 4,
        bias: bool = False,
        gather_output: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        size, self.collectives = collectives.size, collectives
        self.words = Layout.even(4 * width, size)
        hidden = Layout.even(width if gather_output else 2 * width, size)
        split = {"bias": bias, "sequence_parallel": sequence_parallel}
        self.embedding = VocabularyParallelEmbedding(
            self.words, width, collectives, sequence_parallel=sequence_parallel
        )
        self.column = ColumnParallelLinear(
            width, hidden, collectives, gather_output=gather_output, **split
        )
        self.row = None if gather_output else RowParallelLinear(hidden, width, collectives, **split)
        self.head = ColumnParallelLinear(width, self.words, collectives, **split)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.column(self.embedding(ids)).tanh()
        logits = self.head(x if self.row is None else self.row(x))
        return vocabulary_parallel_cross_entropy(logits, targets, self.words, self.collectives)
