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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core import Collectives
from pcomm.core.collectives import differentiable, with_adjoint
from pcomm.core.exchange.index import inverse_order

__all__ = ["Dispatch", "count"]


@dataclass(frozen=True)
class _Order:
    """A permutation of rows, and the one that undoes it."""

    forth: Tensor
    back: Tensor

    @classmethod
    def sorting(cls, keys: Tensor) -> _Order:
        """What brings rows into the order of their keys; equal keys stay as they are."""
        forth = keys.argsort(stable=True)
        return cls(forth, inverse_order(forth))

    @property
    def inverse(self) -> _Order:
        return _Order(self.back, self.forth)

    def apply(self, x: Tensor) -> Tensor:
        return with_adjoint(x, lambda x: x.index_select(0, self.forth), self.inverse.apply)


@dataclass(frozen=True)
class Dispatch:
    """Where the rows of one batch of tokens go; made by `plan`.

    Attributes:
        row_counts_e: `[e]`, int64: rows for each expert of this rank.
    """

    row_counts_e: Tensor
    _experts_per_token: int
    _by_expert: _Order
    _by_local_expert: _Order | None
    _send_sizes: Sequence[int] | None
    _receive_sizes: Sequence[int] | None
    _collectives: Collectives

    @classmethod
    def plan(cls, experts_TK: Tensor, num_experts: int, collectives: Collectives) -> Dispatch:
        """The ways of the tokens that have chosen `experts_TK`.

        Collective over the expert-parallel group: one all-to-all of `num_experts` integers, and a
        wait for it; on one rank nothing. A rank may have no tokens, and an expert no rows.

        Args:
            experts_TK: int64.
            num_experts: E; rank r holds the r-th of equal stretches.
            collectives: Of the expert-parallel group, without gradients.
        """
        chosen_C = experts_TK.flatten()
        by_expert = _Order.sorting(chosen_C)
        counts_E = count(chosen_C, num_experts)
        top_k = experts_TK.shape[1]
        if collectives.size == 1:
            return cls(counts_E, top_k, by_expert, None, None, None, collectives)
        own = num_experts // collectives.size
        received_Se = collectives.all_to_all(counts_E).view(collectives.size, own)
        sums_2S = torch.stack([counts_E.view(-1, own).sum(1), received_Se.sum(1)])
        sent, received = sums_2S.tolist()
        # Rows come sender by sender, each sender's sorted by expert.
        arriving_N = torch.arange(own, device=chosen_C.device).repeat(collectives.size)
        arriving_N = arriving_N.repeat_interleave(received_Se.flatten(), output_size=sum(received))
        return cls(
            received_Se.sum(0),
            top_k,
            by_expert,
            _Order.sorting(arriving_N) if own > 1 else None,
            sent,
            received,
            differentiable(collectives),
        )

    def send(self, x_TD: Tensor) -> Tensor:
        """The rows `[N, D]` of this rank's experts, sorted by expert.

        Collective: one all-to-all, and one in backward.
        """
        rows = self._repeat(x_TD)
        if self._send_sizes is None:
            return rows
        rows = self._exchange(rows, self._send_sizes, self._receive_sizes)
        return rows if self._by_local_expert is None else self._by_local_expert.apply(rows)

    def bring_back(self, y_ND: Tensor) -> Tensor:
        """`[T, K, D]`: what the experts made of each token, in the order of its choices.

        Collective: one all-to-all, and one in backward.
        """
        if self._by_local_expert is not None:
            y_ND = self._by_local_expert.inverse.apply(y_ND)
        if self._send_sizes is not None:
            y_ND = self._exchange(y_ND, self._receive_sizes, self._send_sizes)
        y_CD = self._by_expert.inverse.apply(y_ND)
        return y_CD.view(-1, self._experts_per_token, y_CD.shape[1])

    def _repeat(self, x_TD: Tensor) -> Tensor:
        """Each token as many times as it has experts, sorted by expert."""
        tokens_C = self._by_expert.forth // self._experts_per_token
        return with_adjoint(x_TD, lambda x: x.index_select(0, tokens_C), self._add_up)

    def _add_up(self, rows_CD: Tensor) -> Tensor:
        """The sum of each token's rows: what undoes `_repeat` in backward."""

        def add(rows_CD: Tensor) -> Tensor:
            in_order = rows_CD.index_select(0, self._by_expert.back)
            return in_order.view(-1, self._experts_per_token, in_order.shape[1]).sum(1)

        return with_adjoint(rows_CD, add, self._repeat)

    def _exchange(
        self, rows: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None
    ) -> Tensor:
        return self._collectives.all_to_all(rows, send_sizes=sent, receive_sizes=received)


def count(values: Tensor, num_values: int) -> Tensor:
    """`[num_values]`, int64, on the device: how often each of 0 to `num_values` - 1 occurs."""
    zeros = torch.zeros(num_values, dtype=torch.int64, device=values.device)
    # bincount would wait for the device to learn the largest value.
    return zeros.index_add_(0, values, torch.ones_like(values))
