"""The loss that keeps experts busy evenly, the same however the ranks share the batch.

For one row of tokens (`train.sequence_length` of them) it is

    E * sum over experts e of f_e P_e

with f_e the share of the row's choices that went to e, and P_e the row's mean probability of e. It
is 1 where both are even, and larger where tokens crowd. The loss of a layer is the mean over all
rows of the global batch, that of a model the sum over its layers, times `model.balance_loss`.

A row is the largest set of tokens that is the same for every division of a batch into replicas and
micro-batches. Fractions over a micro-batch would change with both, and over all replicas they
would need a sum over every rank in each layer; of a row, only context- and tensor-parallel ranks
hold parts, and they add up integers once, in forward alone.

Source of the formula: Fedus et al., Switch Transformers, 2021; by sequence as in DeepSeek-AI,
DeepSeek-V2, 2024.
"""

# Shape suffixes: T tokens that this rank routes, R rows of the micro-batch, E experts, K per token.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pcomm.core import Collectives
from pcomm.gdn_cp import Plan
from pcomm.integration.models.moe.dispatch import count
from pcomm.integration.models.moe.router import Routing
from pcomm.integration.models.moe.token_shares import token_layout

__all__ = ["Balance", "rows_of_tokens", "with_side_loss"]


@dataclass(frozen=True)
class Balance:
    """What the layers of one training pass need for their balance losses, and what they found.

    Args:
        row_of_token_T: `[T]`, int64: the row of each token that this rank routes; R for one that
            only fills up the micro-batch.
        num_rows: R, the number of rows of the micro-batch.
        row_tokens: Number of tokens in a row.
        rows_in_batch: Number of rows in the global batch of a step, over which the loss is a mean.
        coefficient: Factor of the loss.
        collectives: Collectives of the ranks that hold tokens of the same rows, without gradients.
        has_filling: True if tokens fill up the micro-batch; they count for nothing.
    """

    row_of_token_T: Tensor
    num_rows: int
    row_tokens: int
    rows_in_batch: int
    coefficient: float
    collectives: Collectives
    has_filling: bool = False
    _found: list[Tensor] = field(default_factory=list)

    def observe(self, routing: Routing) -> Tensor:
        """The weights of `routing`, whose backward also brings the loss of this layer.

        Collective over the ranks that share rows: one all-reduce of R E integers. Not in backward.
        """
        probabilities_TE = routing.probabilities_TE
        num_experts, top_k = probabilities_TE.shape[1], routing.experts_TK.shape[1]
        # Tokens that fill up a batch stand in one more row, which counts for nothing.
        num_rows = self.num_rows + self.has_filling
        places = self.row_of_token_T.unsqueeze(1) * num_experts + routing.experts_TK
        counts_RE = self.collectives.all_reduce(
            count(places.flatten(), num_rows * num_experts)
        ).view(num_rows, num_experts)
        if self.has_filling:
            counts_RE[-1] = 0
        # Each token adds its own part of P_e, so parts add up over ranks and micro-batches.
        factor = num_experts / (self.row_tokens**2 * top_k * self.rows_in_batch)
        crowd_TE = counts_RE.index_select(0, self.row_of_token_T).to(probabilities_TE.dtype)
        mine = factor * (crowd_TE * probabilities_TE).sum()
        self._found.append(mine.detach())
        return with_side_loss(routing.weights_TK, self.coefficient * mine)

    def total(self) -> Tensor:
        """This rank's part of the sum over layers, without the coefficient; fp64, local.

        To be read before backward: a layer that is computed again there is counted again.
        """
        return torch.stack([part.double() for part in self._found]).sum()


def rows_of_tokens(
    plan: Plan, row_tokens: int, tensor_parallel: Collectives, device: torch.device
) -> Tensor:
    """`[T]`, int64: the row in the micro-batch of each token that this rank routes. Local.

    Args:
        plan: The plan of the micro-batch; each context-parallel rank has one range of its tokens.
        row_tokens: Number of tokens in a row.
        tensor_parallel: Collectives of the tensor-parallel group, whose ranks share that range.
        device: Device of the result.
    """
    length = plan.tokens.local_tokens
    (mine,) = token_layout(length, tensor_parallel.size).runs[tensor_parallel.rank] or ((0, 0),)
    start = plan.rank * length
    return torch.arange(start + mine[0], start + mine[1], device=device) // row_tokens


class _SideLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype, ctx.loss_device = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), dtype=ctx.loss_dtype, device=ctx.loss_device)


def with_side_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, such that any backward through it also runs that of `loss`, with a gradient of 1.

    So a layer in the middle of a model adds a loss of its own without handing it from layer to
    layer, and it survives a forward pass that is computed again in backward.
    """
    result: Tensor = _SideLoss.apply(x, loss)  # type: ignore[no-untyped-call]
    return result
