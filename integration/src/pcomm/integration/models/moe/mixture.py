"""A block's MLP with experts: router, exchange, experts, exchange, weighted sum."""

# Shape suffixes: T tokens, t the share that this rank routes, D width, K experts per token.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.tensor_parallel import ParamLayout
from pcomm.inference.roofline import ExpertWeights
from pcomm.integration.models.layer_builder import LayerBuilder
from pcomm.integration.models.mlp import SwiGLU
from pcomm.integration.models.moe.balance import Balance
from pcomm.integration.models.moe.dispatch import Dispatch, count
from pcomm.integration.models.moe.experts import Experts
from pcomm.integration.models.moe.router import Router, Routing
from pcomm.integration.models.moe.token_shares import join_tokens, split_tokens

__all__ = ["MixtureOfExperts"]

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
