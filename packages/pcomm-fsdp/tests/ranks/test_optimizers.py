"""Optimizers: those that are not right on shards are refused, and guards go with their model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from fsdp_support.trainings import Block, SmallModel, open_two, shard
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles, Scope

# -- optimizers that are not torch's: right on shards, or refused before their first step -------

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
    for update in (adam, in_blocks, *REFUSED):
        check(rank, 2, update)


@pytest.mark.soak
@ranks(3)
def test_equal_to_one_process_or_refused_on_three_ranks(rank: int) -> None:
    for update in (adam, sign, *REFUSED):
        check(rank, 3, update)


# -- guards go with their model, keep two models apart, and know scopes of their own ------------


class Experts(nn.Module):
    """A dense layer, and one of which every rank has another."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(5, 7)
        torch.manual_seed(expert)
        self.expert = nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.expert(self.dense(x))
        return y


def batch(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).double()


@ranks(2)
def test_experts_count_in_norms_and_overflow(rank: int) -> None:
    """The expert of each rank is entire there, and one of all the model's parameters."""
    topology = Topology({"dp": 2, "one": 1})
    with open_groups(topology, [("dp", "gather"), ("dp", "reduce"), "one"]) as groups:
        alone = Roles(groups["one"], groups["one"])
        expert = Scope(
            lambda name, _: name.startswith("expert"),
            alone,
            divisor=1,
            spread=groups["dp", "gather"],
        )
        model = Experts(rank)
        sharded = shard(model, groups, units=[nn.Linear], scopes={"expert": expert})
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for spoils in (False, True):
            optimizer.zero_grad()
            scaler.scale(model(batch(rank)).square().mean()).backward()
            if spoils and rank == 1:
                assert model.expert.bias.grad is not None
                model.expert.bias.grad[0] = float("nan")
            scaler.unscale_(optimizer)
            before = [parameter.clone() for parameter in model.parameters()]
            if not spoils:
                expected = sharded.grad_norm()
                found = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
                torch.testing.assert_close(
                    sharded.grad_norm().item(), 1e-3 * expected.item() / (expected.item() + 1e-6)
                )
            scaler.step(optimizer)
            scaler.update()
            moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert any(moved) is not spoils, f"rank {rank} moved {moved}"
            assert scaler.get_scale() == (1.0 if spoils else 2.0)


@ranks(2)
def test_an_overflow_of_experts_that_are_not_spread(rank: int) -> None:
    """Their optimizer has no parameter that ranks share, and the scale is still that of all."""
    topology = Topology({"dp": 2, "one": 1})
    with open_groups(topology, [("dp", "gather"), ("dp", "reduce"), "one"]) as groups:
        alone = Roles(groups["one"], groups["one"])
        expert = Scope(lambda name, _: name.startswith("expert"), alone)
        model = Experts(rank)
        shard(model, groups, units=[nn.Linear], scopes={"expert": expert})
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.expert, model.dense)]
        scaler.scale(model(batch(rank)).square().mean()).backward()
        gradients = [p.grad for p in model.expert.parameters() if p.grad is not None]
        if rank == 1:
            gradients[1][0] = float("nan")
        before = model.expert.bias.clone()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.expert.bias, before)
        assert scaler.get_scale() == 1.0
        # They are whole, and nothing that one does with them alone needs other ranks.
        assert float(gradients[0].norm()) > 0
        assert torch.cat([one.flatten() for one in gradients]).numel() == 24


MIXING: dict[str, Callable[[Tensor], object]] = {
    "histc": lambda g: g.histc(4),
    "histogram": lambda g: torch.histogram(g, 4),
    "linalg.svdvals": torch.linalg.svdvals,
    "linalg.qr": torch.linalg.qr,
    "linalg.matrix_norm": torch.linalg.matrix_norm,
    "linalg.matrix_rank": torch.linalg.matrix_rank,
    "renorm_": lambda g: g.clone().renorm_(2, 0, 1.0),
    "cumsum_": lambda g: g.clone().cumsum_(0),
    "addmm_": lambda g: g.new_zeros(5, 5).addmm_(g.mT, g),
    "normalize": functional.normalize,
    "layer_norm": lambda g: functional.layer_norm(g, g.shape),
    "mse_loss": lambda g: functional.mse_loss(g, torch.zeros_like(g)),
    "log_softmax": lambda g: g.log_softmax(0),
    "cov": torch.cov,
    "argsort": torch.argsort,
    "_foreach_max": lambda g: torch._foreach_max([g]),
    "gradient / norm": lambda g: g / g.norm(),
    "_foreach_div_ by a norm": lambda g: torch._foreach_div_([g.clone()], [g.norm()]),
}


@ranks(2)
def test_what_mixes_elements_of_a_shard(rank: int) -> None:
    """By whatever form of the function: in place, of a namespace, or for lists."""
    with open_two() as groups:
        model = Experts(0)
        shard(model, groups, units=[nn.Linear])
        model(batch(rank)).square().mean().backward()
        gradient = model.dense.weight.grad
        assert gradient is not None
        for function in MIXING.values():
            with pytest.raises(UnsupportedError, match="a shard of the gradient"):
                function(gradient)
        torch.testing.assert_close(torch._foreach_maximum([gradient], 0.0)[0], gradient.clamp(0))
        assert gradient.mul_(2).sqrt_().addcmul_(gradient, gradient).shape == gradient.shape


@ranks(2)
def test_guards_go_with_the_model(rank: int) -> None:
    """Torch keeps one list of hooks for all optimizers, and ours is there once for all models."""
    hooks = torch_optimizer._global_optimizer_pre_hooks
    with open_two() as groups:
        models = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)) for _ in range(2)]
        sharded = [shard(model, groups, units=[nn.Linear]) for model in models]
        before = len(hooks)
        optimizers = [torch.optim.SGD(model.parameters(), momentum=0.9) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
        # What is allowed for one is not for the other.
        with sharded[0].as_shards():
            models[0].state_dict()
            optimizers[0].state_dict()
            with pytest.raises(ConfigError):
                models[1].state_dict()
            with pytest.raises(ConfigError):
                optimizers[1].state_dict()
        # Without what fully_shard returned, the model is guarded as before.
        del sharded
        gc.collect()
        with pytest.raises(ConfigError):
            models[0].state_dict()
        with pytest.raises(UnsupportedError):
            torch.optim.LBFGS(models[0].parameters()).step(lambda: torch.zeros(()))
        references = [weakref.ref(model) for model in models]
        del model, models, optimizer, optimizers
        gc.collect()
        assert not any(reference() for reference in references)
        assert len(hooks) == before


@ranks(2)
def test_a_model_may_go_while_torch_calls_its_hooks(rank: int) -> None:
    """Collection comes when it likes, also between two hooks of another model's optimizer."""

    def collect(*_: object) -> None:
        gc.collect()

    with open_two() as groups:
        model = nn.Linear(5, 3)
        shard(model, groups, units=[])
        gone = weakref.ref(model)
        collects = torch_optimizer.register_optimizer_step_pre_hook(collect)
        try:
            other = nn.Linear(5, 3)
            shard(other, groups, units=[])
            other(torch.ones(2, 5)).sum().backward()
            gc.disable()
            del model
            torch.optim.SGD(other.parameters()).step()
        finally:
            gc.enable()
            collects.remove()
        assert gone() is None
