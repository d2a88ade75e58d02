"""Experts on one GPU against the CPU; never run yet, because no GPU was at hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcomm.core.testing import assert_as_accurate
from pcomm.integration.models.experts import grouped_linear, has_grouped_kernel, loop_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def results(device: str, dtype: torch.dtype, counts: list[int], *, in_loop: bool) -> list[Tensor]:
    """Product and both gradients, of inputs that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(4)
    x, weight, upstream = (
        torch.randn(shape, generator=generator).bfloat16().to(device, dtype)
        for shape in ((sum(counts), 64), (len(counts), 32, 64), (sum(counts), 32))
    )
    x.requires_grad_()
    weight.requires_grad_()
    assert in_loop or has_grouped_kernel(x, weight)
    y = (loop_linear if in_loop else grouped_linear)(x, weight, torch.tensor(counts, device=device))
    y.backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    return [one.detach().cpu() for one in (y, x.grad, weight.grad)]


@pytest.mark.parametrize("counts", [[17, 0, 40, 7], [0, 0, 64, 0]], ids=str)
def test_the_grouped_kernel_is_as_accurate_as_products_one_by_one(counts):
    kernel = results("cuda", torch.bfloat16, counts, in_loop=False)
    loop = results("cuda", torch.bfloat16, counts, in_loop=True)
    exact = results("cpu", torch.float64, counts, in_loop=True)
    for mine, plain, reference in zip(kernel, loop, exact, strict=True):
        assert_as_accurate(mine, plain, reference, factor=2.0, num_terms=64)
