"""The way of each token to its experts and back: one exchange each way.

A token that has chosen K experts becomes K rows. Rows are sorted by expert, so that those for one
rank lie side by side, and sent in one all-to-all; the experts' results come back the same way. No
expert has a capacity and no token is dropped, so the parts of the exchange are uneven: the ranks
tell each other how many rows they will send in an all-to-all of E integers, and wait for it on the
host, which must know sizes before it can post the exchange.

Rows move by index maps that are permutations (or repeat each token K times), and the gradient
moves by the inverse map: a gather, never an atomic addition, so it is the same in every run.
"""

# Shape suffixes: T tokens, K experts per token, D width, E experts, S ranks of the group,
# e experts of one rank; C = T K choices of this rank, N rows that its experts get.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core import Collectives
from pcomm.core.exchange import Permutation, RowMoves

__all__ = ["Dispatch", "count"]


@dataclass(frozen=True)
class Dispatch:
    """Where the rows of one batch of tokens go; made by `plan`.

    Attributes:
        row_counts_e: `[e]`, int64: number of rows for each expert of this rank.
    """

    row_counts_e: Tensor
    _moves: RowMoves
    _collectives: Collectives

    @classmethod
    def plan(cls, experts_TK: Tensor, num_experts: int, collectives: Collectives) -> Dispatch:
        """The ways of the tokens that have chosen `experts_TK`.

        Collective over the expert-parallel group: one all-to-all of `num_experts` integers, and a
        wait for it; on one rank nothing. A rank may have no tokens, and an expert no rows.

        Args:
            experts_TK: `[T, K]`, int64: the experts that each token has chosen.
            num_experts: E; rank r holds the r-th of equal shares.
            collectives: Collectives of the expert-parallel group.
        """
        chosen_C = experts_TK.flatten()
        by_expert = Permutation.sorting(chosen_C)
        counts_E = count(chosen_C, num_experts)
        top_k = experts_TK.shape[1]
        if collectives.size == 1:
            return cls(counts_E, RowMoves(None, None, by_expert, None, top_k), collectives)
        own = num_experts // collectives.size
        received_Se = collectives.all_to_all(counts_E).view(collectives.size, own)
        sums_2S = torch.stack([counts_E.view(-1, own).sum(1), received_Se.sum(1)])
        sent, received = sums_2S.tolist()
        # Rows come sender by sender, each sender's sorted by expert.
        arriving_N = torch.arange(own, device=chosen_C.device).repeat(collectives.size)
        arriving_N = arriving_N.repeat_interleave(received_Se.flatten(), output_size=sum(received))
        by_local_expert = Permutation.sorting(arriving_N) if own > 1 else None
        moves = RowMoves(tuple(sent), tuple(received), by_expert, by_local_expert, top_k)
        return cls(received_Se.sum(0), moves, collectives)

    def send(self, x_TD: Tensor) -> Tensor:
        """The rows `[N, D]` of this rank's experts, sorted by expert.

        Collective: one all-to-all, and one in backward.
        """
        return self._moves.apply(x_TD, self._collectives)

    def bring_back(self, y_ND: Tensor) -> Tensor:
        """`[T, K, D]`: what the experts made of each token, in the order of its choices.

        Collective: one all-to-all, and one in backward.
        """
        y_CD = self._moves.inverse.apply(y_ND, self._collectives)
        return y_CD.view(-1, self._moves.copies, y_CD.shape[1])


def count(values: Tensor, num_values: int) -> Tensor:
    """`[num_values]`, int64, on the device: how often each of 0 to `num_values` - 1 occurs."""
    zeros = torch.zeros(num_values, dtype=torch.int64, device=values.device)
    # bincount would wait for the device to learn the largest value.
    return zeros.index_add_(0, values, torch.ones_like(values))
