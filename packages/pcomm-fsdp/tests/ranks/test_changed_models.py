"""What a user changes around a sharded model is followed, or an error: never other numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import STRATEGIES, ZERO
from pcomm.core.errors import ConfigError, PeerError, UnsupportedError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles
from pcomm.fsdp.sharded import Sharded

both = pytest.mark.parametrize("strategy", ["zero3", "zero1"])
every = pytest.mark.parametrize("strategy", ZERO)


class Model(nn.Module):
    """Two units and a weight of the root; `odd` is computed with them at the end."""

    def __init__(self, odd: Callable[[Model, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(4, 4))
        self.units = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.odd = odd
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x if self.odd is None else self.odd(self, x)


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(batch(number, rank)).square().mean()


def plain_backward(model: nn.Module, number: int) -> None:
    (sum(loss_of(model, number, rank) for rank in (0, 1)) / 2).backward()


@contextmanager
def sharding(strategy: str = "zero3") -> Iterator[Callable[[nn.Module], Sharded]]:
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        roles, shard = Roles(groups["dp"], groups["dp", "reduce"]), STRATEGIES[strategy]
        yield lambda model: fully_shard(model, roles, units=[nn.Linear], reshard=shard)


def check(sharded: Sharded, reference: nn.Module) -> None:
    found = sharded.full_gradients()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


# -- before a model is sharded -----------------------------------------------------------------


def add_hook(model: Model) -> None:
    model.units[0].weight.register_hook(lambda g: g * 2)


def add_late_hook(model: Model) -> None:
    model.units[0].weight.register_post_accumulate_grad_hook(lambda p: None)


def tie_by_memory(model: Model) -> None:
    model.units[1].weight = nn.Parameter(model.units[0].weight.detach().t())


def keep_a_view(model: Model) -> None:
    model.table_t = model.table.t()


def keep_a_list(model: Model) -> None:
    model.units[0].all_weights = [model.units[0].weight]


BEFORE: dict[Callable[[Model], None], str] = {
    add_hook: r"units\.0\.weight'(.|\n)*a hook",
    add_late_hook: r"units\.0\.weight'(.|\n)*a hook",
    tie_by_memory: r"units\.1\.weight'(.|\n)*same memory|units\.0\.weight'(.|\n)*same memory",
    keep_a_view: r"table'(.|\n)*table_t of module '\(root\)' lies in the same memory",
    keep_a_list: r"units\.0\.weight'(.|\n)*all_weights of module 'units\.0'",
}


@ranks(2)
def test_what_would_be_left_behind(rank: int) -> None:
    with sharding() as shard:
        for change, message in BEFORE.items():
            model = Model()
            change(model)
            with pytest.raises(ConfigError, match=message):
                shard(model)


@ranks(2)
def test_parameters_side_by_side_in_one_memory(rank: int) -> None:
    reference, model = Model(), Model()
    flat = torch.cat([unit.bias.detach() for unit in model.units])
    for unit, part in zip(model.units, flat.split(4), strict=True):
        unit.bias = nn.Parameter(part)
    with sharding() as shard:
        sharded = shard(model)
        loss_of(model, 0, rank).backward()
        plain_backward(reference, 0)
        check(sharded, reference)


# -- afterwards --------------------------------------------------------------------------------


def swap_data(model: Model) -> None:
    model.units[0].weight.data = model.units[0].weight.data * 0


def convert(model: Model) -> None:
    model.float()


def replace(model: Model) -> None:
    model.units[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))


def add_norm_in_place(model: Model) -> None:
    def shrink(module: nn.Module, _: object) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    model.units[0].register_forward_pre_hook(shrink)


AFTER: dict[Callable[[Model], None], str] = {
    swap_data: r"units\.0\.weight'(.|\n)*another tensor",
    convert: r"table'(.|\n)*another tensor",
    replace: r"units\.0\.weight'(.|\n)*another object",
    add_hook: r"units\.0\.weight'(.|\n)*a hook",
    add_late_hook: r"units\.0\.weight'(.|\n)*a hook",
    add_norm_in_place: r"unit 'units\.0' writes into gathered parameters",
}


@both
@ranks(2)
def test_what_buffers_would_not_follow(rank: int, strategy: str) -> None:
    """Before a first step and after one."""
    with sharding(strategy) as shard:
        for change, message in AFTER.items():
            for steps in (0, 1):
                model = Model()
                shard(model)
                for number in range(steps):
                    loss_of(model, number, rank).backward()
                change(model)
                with pytest.raises(ConfigError, match=message):
                    loss_of(model, 9, rank).backward()


@ranks(2)
def test_copies_and_borrowed_parameters(rank: int) -> None:
    model = Model()
    with sharding() as shard:
        shard(model)
        with pytest.raises(ConfigError, match=r"copy\.deepcopy of a sharded model"):
            copy.deepcopy(model)
        own = {"units.0.weight": torch.zeros(4, 4, dtype=torch.float64)}
        with pytest.raises(ConfigError, match="another object"):
            torch.func.functional_call(model, own, batch(0, rank))


# -- backward ----------------------------------------------------------------------------------


@both
@ranks(2)
def test_a_weight_before_its_unit_has_gathered_it(rank: int, strategy: str) -> None:
    """Its mean is that of a part, which no shape shows."""
    model = Model()
    model.units[0].register_forward_hook(lambda _m, _x, y: y * model.units[1].weight.mean())
    with sharding(strategy) as shard:
        shard(model)
        with pytest.raises(ConfigError, match=r"shard of 'units\.1\.weight'"):
            loss_of(model, 0, rank).backward()


@both
@ranks(2)
def test_a_weight_that_is_whole_on_one_rank(rank: int, strategy: str) -> None:
    """On the other it is empty, and torch says so; all ranks are told what it is."""
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)]
    model = nn.Sequential(nn.Identity(), nn.Sequential(*layers))
    model[0].register_forward_hook(lambda _m, _x, y: y + y @ layers[0].weight.t())
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        fully_shard(model, roles, units=[model[1]], reshard=STRATEGIES[strategy])
        with pytest.raises((ConfigError, PeerError, RuntimeError)) as told:
            loss_of(model, 0, rank).backward()
        notes = getattr(told.value, "__notes__", [])
        assert "this rank's shard" in " ".join([str(told.value), *notes])


@both
@ranks(2)
def test_a_loss_of_what_no_forward_returned(rank: int, strategy: str) -> None:
    model = Model()
    kept: list[Tensor] = []
    model.units[0].register_forward_hook(lambda m, _x, _y: kept.append(m.bias * 2) and None)
    with sharding(strategy) as shard:
        shard(model)
        loss_of(model, 0, rank)
        with pytest.raises(ConfigError, match=r"units\.0\.bias(.|\n)*has not come to unit"):
            kept[0].sum().backward()


@both
@ranks(2)
def test_a_gradient_of_a_gradient(rank: int, strategy: str) -> None:
    """Refused before anything is computed, and the next step goes on."""
    reference, model = Model(), Model()
    with sharding(strategy) as shard:
        sharded = shard(model)
        x = batch(0, rank).requires_grad_()
        y = (x @ torch.ones(4, 4, dtype=torch.float64) + model(x)).sum()
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            torch.autograd.grad(y, x, create_graph=True)
        loss_of(model, 1, rank).backward()
        plain_backward(reference, 1)
        check(sharded, reference)


# -- between micro-batches and steps -----------------------------------------------------------


@every
@ranks(2)
def test_evaluation_between_backward_and_the_optimizer(rank: int, strategy: str) -> None:
    """What it gathers is old when the optimizer has stepped."""
    reference, model = Model(), Model()
    with sharding(strategy) as shard:
        sharded = shard(model)
        ours = torch.optim.SGD(sharded.parameters(), lr=0.5)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
        for step in range(3):
            loss_of(model, step, rank).backward()
            plain_backward(reference, step)
            for _ in range(2):
                with torch.no_grad():
                    found, expected = loss_of(model, 9, 0), loss_of(reference, 9, 0)
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            check(sharded, reference)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()


@every
@ranks(2)
def test_evaluation_between_micro_batches(rank: int, strategy: str) -> None:
    reference, model = Model(), Model()
    with sharding(strategy) as shard:
        sharded = shard(model)
        for number in range(4):
            with sharded.accumulate(is_last=number % 2 == 1):
                loss_of(model, number, rank).backward()
            with torch.no_grad():
                loss_of(model, 9, rank)
            plain_backward(reference, number)
        check(sharded, reference)


@every
@ranks(2)
def test_a_step_that_is_given_up_leaves_nothing(rank: int, strategy: str) -> None:
    reference, model = Model(), Model()
    with sharding(strategy) as shard:
        sharded = shard(model)
        with sharded.accumulate(is_last=False):
            loss_of(model, 0, rank).backward()
        sharded.zero_grad()
        loss_of(model, 1, rank).backward()
        plain_backward(reference, 1)
        check(sharded, reference)


@every
@ranks(2)
def test_a_forward_without_backward_within_a_step(rank: int, strategy: str) -> None:
    """It changes nothing: gradients of the micro-batches before are there."""
    reference, model = Model(), Model()
    with sharding(strategy) as shard:
        sharded = shard(model)
        with sharded.accumulate(is_last=False):
            loss_of(model, 0, rank).backward()
            loss_of(model, 9, rank)
        loss_of(model, 1, rank).backward()
        for number in (0, 1):
            plain_backward(reference, number)
        check(sharded, reference)
