"""Which experts a token goes to, and with what weight."""

# Shape suffixes: T tokens, D width, E experts, K experts per token.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.tensor_parallel import ParamLayout

__all__ = ["Router", "Routing"]


class Routing(NamedTuple):
    """The choice of each token."""

    experts_TK: Tensor
    """int64: its experts, the likeliest first."""

    weights_TK: Tensor
    """How much each of their results counts."""

    probabilities_TE: Tensor
    """Of all experts; the balance loss acts on these."""


class Router(nn.Module):
    """Softmax over all experts, then the K likeliest of each token. Local.

    The weights are the K probabilities, or these divided by their sum. With K = 1 the quotient
    would be 1 whatever the router does, and it would learn nothing.

    Args:
        width: D.
        num_experts: E.
        experts_per_token: K.
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
