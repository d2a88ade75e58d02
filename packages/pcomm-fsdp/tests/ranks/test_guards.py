"""Guards go with their model, keep two models apart, and know scopes of their own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer

from fsdp_support.trainings import roles_of
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles, Scope


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
        roles = roles_of(groups)
        model = Experts(rank)
        sharded = fully_shard(model, roles, units=[nn.Linear], scopes={"expert": expert})
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
        roles = roles_of(groups)
        model = Experts(rank)
        fully_shard(model, roles, units=[nn.Linear], scopes={"expert": expert})
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


REFUSED: dict[str, Callable[[Tensor], object]] = {
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
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        model = Experts(0)
        fully_shard(model, Roles(groups["dp"], groups["dp"]), units=[nn.Linear])
        model(batch(rank)).square().mean().backward()
        gradient = model.dense.weight.grad
        assert gradient is not None
        for function in REFUSED.values():
            with pytest.raises(UnsupportedError, match="a shard of the gradient"):
                function(gradient)
        torch.testing.assert_close(torch._foreach_maximum([gradient], 0.0)[0], gradient.clamp(0))
        assert gradient.mul_(2).sqrt_().addcmul_(gradient, gradient).shape == gradient.shape


@ranks(2)
def test_guards_go_with_the_model(rank: int) -> None:
    """Torch keeps one list of hooks for all optimizers, and ours is there once for all models."""
    hooks = torch_optimizer._global_optimizer_pre_hooks
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        models = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)) for _ in range(2)]
        sharded = [fully_shard(model, roles, units=[nn.Linear]) for model in models]
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

    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        model = nn.Linear(5, 3)
        fully_shard(model, roles, units=[])
        gone = weakref.ref(model)
        collects = torch_optimizer.register_optimizer_step_pre_hook(collect)
        try:
            other = nn.Linear(5, 3)
            fully_shard(other, roles, units=[])
            other(torch.ones(2, 5)).sum().backward()
            gc.disable()
            del model
            torch.optim.SGD(other.parameters()).step()
        finally:
            gc.enable()
            collects.remove()
        assert gone() is None
