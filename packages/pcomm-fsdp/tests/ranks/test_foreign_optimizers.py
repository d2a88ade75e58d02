"""Optimizers that are not torch's: right on shards, or refused before their first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from fsdp_support.trainings import Block, SmallModel
from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles

Update = Callable[[Tensor, dict[str, Any]], Tensor]


class Stepper(Optimizer):
    """Subtracts what a function makes of a momentum and other plain state."""

    def __init__(self, parameters: Iterable[Tensor], update: Update) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"momentum": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["momentum"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.sub_(self.update(p, state), alpha=group["lr"])


def adam(_: Tensor, state: dict[str, Any]) -> Tensor:
    return state["momentum"] / (state["square"].sqrt() + 1e-3)


def sign(_: Tensor, state: dict[str, Any]) -> Tensor:
    return state["momentum"].sign()


def in_blocks(_: Tensor, state: dict[str, Any]) -> Tensor:
    """The momentum is kept in 8 bits, with a scale for each 16 elements."""
    momentum = state["momentum"]
    flat = F.pad(momentum.flatten(), (0, -momentum.numel() % 16)).view(-1, 16)
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    kept = ((flat / scale).round() * scale).flatten()[: momentum.numel()]
    momentum.copy_(kept.view_as(momentum))
    return momentum


def trust_ratio(p: Tensor, state: dict[str, Any]) -> Tensor:
    update = adam(p, state)
    return update * (p.norm().clamp(0, 10) / (update.norm() + 1e-6))


def orthogonal(_: Tensor, state: dict[str, Any]) -> Tensor:
    momentum: Tensor = state["momentum"]
    if momentum.dim() < 2:
        return momentum
    x = momentum / (momentum.norm() + 1e-7)
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def preconditioned(_: Tensor, state: dict[str, Any]) -> Tensor:
    momentum: Tensor = state["momentum"]
    if momentum.dim() < 2:
        return momentum
    size = momentum.shape[1]
    product = state.setdefault("product", 1e-6 * torch.eye(size, dtype=momentum.dtype))
    product.add_(momentum.T @ momentum)
    values, vectors = torch.linalg.eigh(product)
    return momentum @ vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


RIGHT: dict[Update, float] = {adam: 1e-9, sign: 1e-9, in_blocks: 5e-3}
REFUSED: list[Update] = [trust_ratio, orthogonal, preconditioned]


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def check(rank: int, size: int, update: Update) -> None:
    torch.manual_seed(0)
    # The embedding is most of the root then, and cut.
    model, reference = (SmallModel(dim=11, vocabulary=38, is_tied=True).double() for _ in "ab")
    reference.load_state_dict(model.state_dict())
    with open_groups(Topology({"dp": size}), ["dp"]) as groups:
        sharded = fully_shard(model, Roles(groups["dp"], groups["dp"]), units=[Block])
        before = sharded.full_state_dict()
        assert any(not plan.layout.is_entire(0) for plan in sharded.plans)
        optimizers = [Stepper(m.parameters(), update) for m in (model, reference)]
        for optimizer in optimizers:
            # As a warm-up does it: the first step has no rate.
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 2) / 2)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 * step
            model.loss(tokens(step, rank)).backward()
            (sum(reference.loss(tokens(step, r)) for r in range(size)) / size).backward()  # type: ignore[union-attr]
            if update in REFUSED:
                with pytest.raises(UnsupportedError, match=r"Stepper looks at several elements"):
                    optimizers[0].step()
                for key, value in sharded.full_state_dict().items():
                    assert torch.equal(value, before[key]), key
                return
            for optimizer in optimizers:
                optimizer.step()
        tolerance = RIGHT[update]
        found = sharded.full_state_dict()
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=tolerance, msg=key)
            assert key == "scale" or not torch.equal(value, before[key])


@ranks(2)
def test_equal_to_one_process_or_refused(rank: int) -> None:
    for update in (*RIGHT, *REFUSED):
        check(rank, 2, update)


@ranks(3)
def test_equal_to_one_process_or_refused_on_three_ranks(rank: int) -> None:
    for update in (adam, *REFUSED):
        check(rank, 3, update)
