"""The gated product and its hand-written backward against autograd."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from pcomm.core.testing import assert_as_accurate, assert_close
from pcomm.integration.models.layers import swiglu


def plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def test_forward_and_backward_equal_autograd():
    torch.manual_seed(0)
    inputs = 3 * torch.randn(7, 10, dtype=torch.float64)
    # Not contiguous, as gradients of a split often are.
    upstream = torch.randn(5, 7, dtype=torch.float64).t()
    found = []
    for function in (swiglu, plain):
        mine = inputs.clone().requires_grad_()
        result = function(mine)
        (gradient,) = torch.autograd.grad(result, mine, upstream)
        found.append((result.detach(), gradient))
    (ours, our_gradient), (theirs, their_gradient) = found
    assert_close(ours, theirs, num_terms=4)
    assert_close(our_gradient, their_gradient, num_terms=8)


def test_bf16_is_as_accurate_as_plain_torch():
    torch.manual_seed(0)
    inputs = torch.randn(64, 32)
    gradients = []
    for function, dtype in (
        (swiglu, torch.bfloat16),
        (plain, torch.bfloat16),
        (plain, torch.float64),
    ):
        mine = inputs.bfloat16().to(dtype).requires_grad_()
        gradients.append(torch.autograd.grad(function(mine).sum(), mine)[0])
    assert_as_accurate(*gradients, num_terms=2)
