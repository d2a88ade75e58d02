"""The experts of one rank: gated MLPs whose weights are stacked."""

# Shape suffixes: N rows, D width, F hidden width of an expert, e experts of this rank.

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcomm.core import Collectives, Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.integration.models.mlp import swiglu
from pcomm.integration.models.moe.grouped_linear import grouped_linear

__all__ = ["Experts"]


class Experts(nn.Module):
    """`W_down(silu(W_gate x) * W_up x)` with the weights of the expert that a row is for.

    An expert lies whole on one rank. Weights `gate_up` `[e, 2F, D]` and `down` `[e, D, F]` are of
    scope `"expert"`: their gradient is summed over the ranks that hold the same experts.

    Args:
        width: D.
        hidden_width: F.
        num_experts: Number of experts over all ranks.
        collectives: Collectives of the expert-parallel group; rank r has the r-th of equal ranges
            of experts.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        LayoutError: The ranks cannot have as many experts each.
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        num_experts: int,
        collectives: Collectives,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layout = Layout.even(num_experts, collectives.size)
        own = layout.sizes[collectives.rank]
        self.gate_up = nn.Parameter(
            torch.empty(own, 2 * hidden_width, width, device=device, dtype=dtype)
        )
        self.down = nn.Parameter(torch.empty(own, width, hidden_width, device=device, dtype=dtype))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        spread = ParamLayout(layout, scope="expert")
        self.param_layouts = {"gate_up": spread, "down": spread}

    def forward(self, x_ND: Tensor, row_counts_e: Tensor) -> Tensor:
        """`[N, D]` to `[N, D]`; local.

        Args:
            x_ND: Rows sorted by expert; computed in their dtype.
            row_counts_e: `[e]`, int64: number of rows of each expert.
        """
        gate_up, down = (weight.to(x_ND.dtype) for weight in (self.gate_up, self.down))
        return grouped_linear(
            swiglu(grouped_linear(x_ND, gate_up, row_counts_e)), down, row_counts_e
        )
