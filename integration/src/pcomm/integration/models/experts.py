"""The experts of a rank: stacked weights, one product for all."""

# Shape suffixes: N rows, D width, F hidden width of an expert, E or e experts of this rank; I input
# features, O output features of a product.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core import Collectives, Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.integration.models.layers import swiglu

__all__ = ["Experts", "grouped_linear", "has_grouped_kernel", "loop_linear"]


class Experts(nn.Module):
    """`W_down(silu(W_gate x) * W_up x)` with the weights of the expert that a row is for.

    An expert lies whole on one rank. Weights `gate_up` `[e, 2F, D]` and `down` `[e, D, F]` are of
    scope `"expert"`: their gradient is summed over the ranks that hold the same experts.

    Args:
        width: Number D of features of a token.
        hidden_width: Number F of features within an expert.
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


# Bytes to which the kernel wants rows aligned.
_ALIGNMENT = 16


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, row_counts_E: Tensor) -> Tensor:
    """`x W_e^T` for the rows of each expert e; local.

    Args:
        x_NI: `[N, I]`, the rows of the first expert, then those of the second, and so on.
        weight_EOI: `[E, O, I]`, the weights of all experts, in the dtype of `x_NI`.
        row_counts_E: `[E]`, int64: number of rows of each expert; their sum is N, and one may be 0.

    Returns:
        `[N, O]`, of the same dtype. An expert without rows has a gradient of zero, not none.
    """
    if has_grouped_kernel(x_NI, weight_EOI):
        return kernel_linear(x_NI, weight_EOI, row_counts_E)
    return loop_linear(x_NI, weight_EOI, row_counts_E)


def has_grouped_kernel(x_NI: Tensor, weight_EOI: Tensor) -> bool:
    """Whether torch has one kernel for all experts: bf16 on CUDA, in aligned rows."""
    return (
        x_NI.is_cuda
        and x_NI.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and x_NI.shape[0] > 0
        and all(n * x_NI.element_size() % _ALIGNMENT == 0 for n in weight_EOI.shape[1:])
    )


def kernel_linear(x_NI: Tensor, weight_EOI: Tensor, row_counts_E: Tensor) -> Tensor:
    """All experts in one kernel; the counts stay on the device, so nothing waits for them."""
    ends_E = row_counts_E.cumsum(0).to(torch.int32)
    result: Tensor = F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=ends_E)
    return result


def loop_linear(x_NI: Tensor, weight_EOI: Tensor, row_counts_E: Tensor) -> Tensor:
    """One product after the other, each on neighbouring rows; any device and dtype."""
    counts = row_counts_E.tolist()
    if not (torch.is_grad_enabled() and (x_NI.requires_grad or weight_EOI.requires_grad)):
        return _products(x_NI, weight_EOI, counts)
    result: Tensor = _Loop.apply(x_NI, weight_EOI, counts)  # type: ignore[no-untyped-call]
    return result


def _products(x_NI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
    result_NO = x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1])
    start = 0
    # One sequence has rows for a few of many experts.
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            torch.mm(x_NI[rows], weight_EOI[expert].T, out=result_NO[rows])
            start += count
    return result_NO


class _Loop(torch.autograd.Function):
    """Writes every product where it belongs: no concatenation, and no stack of gradients."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI)
        ctx.counts = counts
        return _products(x_NI, weight_EOI, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NI, weight_EOI = ctx.saved_tensors
        counts, gradient_NO = ctx.counts, gradients[0]
        for_x_NI, for_weight_EOI = torch.empty_like(x_NI), torch.empty_like(weight_EOI)
        for x, weight, gradient, for_x, for_weight in zip(
            x_NI.split(counts),
            weight_EOI,
            gradient_NO.split(counts),
            for_x_NI.split(counts),
            for_weight_EOI,
            strict=True,
        ):
            torch.mm(gradient, weight, out=for_x)
            # With no rows this is a sum of nothing: zeros.
            torch.mm(gradient.T, x, out=for_weight)
        return for_x_NI, for_weight_EOI, None
