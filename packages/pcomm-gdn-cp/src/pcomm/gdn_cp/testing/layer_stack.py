"""Layers of several mixers in a row on one plan, and what ranks found put together again."""

# t tokens between layers, D model dim

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.gdn_cp.layer_moves import Plan
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.testing.planned_mixers import mixer, weights_of

__all__ = ["LayerResults", "in_pack_order", "layer_stack", "run_layers", "sum_over_ranks", "world"]

# Output and gradient of this rank's tokens, and this rank's gradients of the parameters.
LayerResults = tuple[list[Tensor], list[Tensor]]


def layer_stack(
    plan: Plan, specs: Sequence[Spec], x_tD: Tensor, weights: Sequence[dict[str, Tensor]]
) -> Tensor:
    """`[t, D]`: each mixer on the sum of the input and the outputs before it."""
    for spec, own in zip(specs, weights, strict=True):
        x_tD = x_tD + mixer(plan, spec, x_tD, own)
    return x_tD


def run_layers(
    plan: Plan, specs: Sequence[Spec], hidden_dim: int, *, dtype: torch.dtype = torch.float64
) -> LayerResults:
    """Forward and backward of layers in a row, with the same numbers on every rank."""
    generator = torch.Generator().manual_seed(3)
    shape = (plan.tokens.num_tokens, hidden_dim)
    hidden, upstream = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x = plan.shard(hidden).clone().requires_grad_()
    weights = [weights_of(spec, hidden_dim, dtype=dtype, seed=n) for n, spec in enumerate(specs)]
    y = layer_stack(plan, specs, x, weights)
    leaves = [x, *(leaf for own in weights for leaf in own.values())]
    # On a rank without documents some parameters meet nothing.
    grads = torch.autograd.grad(y, leaves, plan.shard(upstream), materialize_grads=True)
    return [y.detach(), grads[0]], list(grads[1:])


def in_pack_order(tokens: TokenLayout, parts: Sequence[Tensor]) -> Tensor:
    """Tensors of all ranks, `[t, ...]` each, as one in the order of the pack."""
    whole = torch.cat([*parts])
    return torch.empty_like(whole).index_copy_(0, tokens.order, whole)


def sum_over_ranks(of_ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum over the ranks of each of their tensors."""
    return [torch.stack(parts).sum(0) for parts in zip(*of_ranks, strict=True)]


def world() -> dist.ProcessGroup:
    """The default group, where the test has one."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
