"""The experts of a block: router, one exchange each way, and the loss that balances them."""

# Shape suffixes: T tokens, t those of them that this rank routes, D width, K experts per token,
# E experts, e those of one rank, S ranks of the expert-parallel group, R rows of the micro-batch;
# C = T K choices of this rank, N rows that its experts get.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core import Collectives, Layout
from pcomm.core.exchange import Permutation, RowMoves
from pcomm.core.tensor_parallel import ParamLayout, gather_replicated, split_replicated
from pcomm.gdn_cp import Plan
from pcomm.gdn_cp.ops import graph_break
from pcomm.inference.roofline import ExpertWeights
from pcomm.integration.models.experts import Experts
from pcomm.integration.models.layers import LayerBuilder, SwiGLU

__all__ = [
    "Balance",
    "Dispatch",
    "MixtureOfExperts",
    "Router",
    "count",
    "rows_of_tokens",
    "token_layout",
    "with_side_loss",
]


_NORMALISES = {"auto": None, "normalised": True, "probability": False}


class MixtureOfExperts(nn.Module):
    """The weighted sum of what each token's experts make of it, and of a shared expert's result.

    Every token is routed by one rank: where tensor-parallel ranks hold the same tokens, each takes
    a range of them. The shared expert is an MLP like any other, split over these ranks.

    Args:
        build: Sizes, and the tensor- and expert-parallel groups.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        config = build.config
        self._tensor_parallel, self._expert_parallel = build.collectives, build.experts
        self._splits_tokens = build.collectives.size > 1 and not build.sequence_parallel
        self.router = Router(
            config.width,
            config.experts,
            config.experts_per_token,
            normalises=_NORMALISES[config.expert_weights],
            has_partial_gradient=build.collectives.size > 1,
            device=build.device,
            dtype=build.dtype,
        )
        self.experts = Experts(
            config.width,
            config.expert_width,
            config.experts,
            build.experts,
            device=build.device,
            dtype=build.dtype,
        )
        width = config.shared_expert_width
        self.shared = SwiGLU(build, width) if width else None
        self.shared_gate: nn.Parameter | None = None
        if width and config.shared_expert_gate:
            self.shared_gate = build.parameter(1, config.width)
            nn.init.normal_(self.shared_gate, std=config.width**-0.5)
        # Ranks that hold other tokens each see a part of its gradient.
        is_partial = build.sequence_parallel and build.collectives.size > 1
        self.param_layouts = {"shared_gate": ParamLayout(has_partial_gradient=is_partial)}
        self._num_experts, self._per_token = config.experts, config.experts_per_token

    @property
    def expert_weights(self) -> ExpertWeights:
        """Experts of this rank, of which a step of inference reads some."""
        gate_up, down = self.experts.gate_up, self.experts.down
        return ExpertWeights(
            num_experts=gate_up.shape[0],
            per_token=self._per_token,
            bytes_each=gate_up[0].nbytes + down[0].nbytes,
            on_ranks=self._splits_tokens or self._expert_parallel.size > 1,
        )

    def forward(self, x: Tensor, balance: Balance | None = None) -> Tensor:
        """`[T, D]` to `[T, D]`.

        Collective over the expert-parallel group, one exchange of tokens each way in forward and in
        backward, and over the tensor-parallel one where it has the same tokens. A rank without
        tokens takes part.

        Args:
            x: Tokens of the residual stream that this rank has.
            balance: Counts for the balance loss; None outside of training and without such a loss.
        """
        if self._splits_tokens:
            mine_tD = self._route(split_tokens(x, self._tensor_parallel), balance)
            y = join_tokens(mine_tD, x.shape[0], self._tensor_parallel)
        else:
            y = self._route(x, balance)
        return y if self.shared is None else y + self._shared_result(x, self.shared)

    def _shared_result(self, x: Tensor, shared: SwiGLU) -> Tensor:
        y: Tensor = shared(x)
        if self.shared_gate is None:
            return y
        return y * F.linear(x, self.shared_gate).sigmoid()

    def _route(self, x_tD: Tensor, balance: Balance | None) -> Tensor:
        routing = self.router(x_tD)
        if self._expert_parallel.size == 1 and not torch.is_grad_enabled():
            return self._local_result(x_tD, routing)
        return self._exchanged(x_tD, routing, balance)

    @graph_break
    def _exchanged(self, x_tD: Tensor, routing: Routing, balance: Balance | None) -> Tensor:
        """The same by way of the ranks that have the experts, outside of what is compiled.

        How many rows an expert gets is another number in each batch.
        """
        weights_tK = routing.weights_TK if balance is None else balance.observe(routing)
        dispatch = Dispatch.plan(routing.experts_TK, self._num_experts, self._expert_parallel)
        # Rounded before they travel: experts compute in that dtype, and fewer bytes are sent.
        rows_ND = dispatch.send(x_tD.to(_compute_dtype(x_tD)))
        y_tKD = dispatch.bring_back(self.experts(rows_ND, dispatch.row_counts_e))
        return (y_tKD * weights_tK.to(y_tKD.dtype).unsqueeze(-1)).sum(1)

    def _local_result(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """The same where all experts are here and nothing is recorded, without an exchange."""
        experts_TK, weights_TK = routing.experts_TK, routing.weights_TK
        chosen_C, order_C = experts_TK.flatten().sort(stable=True)
        rows_CD = x_TD.index_select(0, order_C // experts_TK.shape[1]).to(_compute_dtype(x_TD))
        y_CD = self.experts(rows_CD, count(chosen_C, self._num_experts))
        y_CD = torch.empty_like(y_CD).index_copy_(0, order_C, y_CD)
        y_TKD = y_CD.view(*experts_TK.shape, y_CD.shape[1])
        return (y_TKD * weights_TK.to(y_TKD.dtype).unsqueeze(-1)).sum(1)


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Routing(NamedTuple):
    """The choice of each token."""

    experts_TK: Tensor
    """int64: its experts, the likeliest first."""

    weights_TK: Tensor
    """How much each of their results counts."""

    probabilities_TE: Tensor
    """Probabilities of all experts; the balance loss acts on these."""


class Router(nn.Module):
    """Softmax over all experts, then the K likeliest of each token. Local.

    The weights are the K probabilities, or these divided by their sum. With K = 1 the quotient
    would be 1 whatever the router does, and it would learn nothing.

    Args:
        width: Number D of features of a token.
        num_experts: Number E of experts.
        experts_per_token: Number K of experts that a token goes to.
        normalises: True to divide the probabilities by their sum; None to do so where K > 1.
        has_partial_gradient: True if this rank routes only some of the tokens of its
            tensor-parallel group, so that the weight's gradient has to be summed over it.
        device: Device of the weight.
        dtype: Dtype of the weight; the router computes in it, also under autocast, because a
            rounded logit sends a token elsewhere.

    Source: Fedus et al., Switch Transformers, 2021; Jiang et al., Mixtral of Experts, 2024.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        experts_per_token: int,
        *,
        normalises: bool | None = None,
        has_partial_gradient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalises = experts_per_token > 1 if normalises is None else normalises
        self.weight = nn.Parameter(torch.empty(num_experts, width, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.param_layouts = {"weight": ParamLayout(has_partial_gradient=has_partial_gradient)}

    def forward(self, x_TD: Tensor) -> Routing:
        """The choice of each token of `[T, D]`; differentiable in weights and probabilities."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(self.weight.dtype), self.weight)
            probabilities_TE = logits_TE.softmax(-1)
        weights_TK, experts_TK = probabilities_TE.topk(self.experts_per_token, -1)
        if self.normalises:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return Routing(experts_TK, weights_TK, probabilities_TE)


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


def token_layout(num_tokens: int, size: int) -> Layout:
    """Which rank routes which tokens: shards that differ by at most one token."""
    return Layout.balanced(num_tokens, size)


def split_tokens(x_TD: Tensor, collectives: Collectives) -> Tensor:
    """This rank's tokens of replicated ones. Backward: an all-gather."""
    layout = token_layout(x_TD.shape[0], collectives.size)
    # A copy: a view that autograd keeps would keep the whole stream.
    return split_replicated(x_TD, layout, collectives, dim=0).clone()


def join_tokens(x_tD: Tensor, num_tokens: int, collectives: Collectives) -> Tensor:
    """All tokens, replicated, from each rank's shard: an all-gather. Backward is local."""
    layout = token_layout(num_tokens, collectives.size)
    return gather_replicated(x_tD, layout, collectives, dim=0)


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
