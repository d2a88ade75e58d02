"""What a user changes around a sharded model is followed, or an error: never other numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fsdp_support.trainings import (
    MICRO_BATCHES,
    STAGES,
    STRATEGIES,
    ZERO,
    check_gradients,
    model_of,
    open_two,
    shard,
    tokens,
)
from pcomm.core.errors import ConfigError, PeerError, UnsupportedError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp.sharded import Sharded

both = pytest.mark.parametrize("strategy", ["zero3", "zero1"])
# What is between two others, the long form does, too.
BETWEEN = {"zero2": pytest.mark.soak}
every = pytest.mark.parametrize(
    "strategy", [pytest.param(one, marks=BETWEEN.get(one, ())) for one in ZERO]
)


class Layer(nn.Linear):
    """A linear layer that does something to itself in forward, when told."""

    inside: Callable[[nn.Linear], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is not None:
            self.inside(self)
        return super().forward(x)


class Model(nn.Module):
    """Three units and a weight of the root. The last unit's bias is on one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(4, 4))
        self.units = nn.ModuleList([Layer(4, 4), Layer(4, 4), Layer(4, 1)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(batch(number, rank)).square().mean()


def check_step(sharded: Sharded, reference: nn.Module, number: int, rank: int) -> None:
    """A backward has the gradients of one process."""
    loss_of(sharded.model, number, rank).backward()
    (sum(loss_of(reference, number, r) for r in (0, 1)) / 2).backward()
    check_gradients(sharded, reference)


def shard_model(model: nn.Module, groups: Groups, strategy: str = "zero3") -> Sharded:
    return shard(model, groups, units=[Layer], reshard=STRATEGIES[strategy])


# -- changes ------------------------------------------------------------------------------------


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


def convert(model: Model) -> None:
    model.float()


def halve(model: Model) -> None:
    model.units[0].half()


def half_of_a_bias(model: Model) -> None:
    model.units[2].bias.data = model.units[2].bias.data.half()


def swap_data(model: Model) -> None:
    model.units[0].weight.data = model.units[0].weight.data * 2


def a_view_of_the_same_memory(model: Model) -> None:
    model.units[0].weight.data = model.units[0].weight.data[:0]


def apply(model: Model) -> None:
    model._apply(lambda x: x * 2)


def replace(model: Model) -> None:
    model.units[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))


def parametrised(model: Model) -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    parametrize.register_parametrization(model.units[0], "weight", Double())


def weight_norm(model: Model) -> None:
    parametrizations.weight_norm(model.units[0])


def old_weight_norm(model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.units[0])


def assign(model: Model) -> None:
    parts = {name: torch.zeros_like(part) for name, part in model.named_parameters()}
    nn.Module.load_state_dict(model, parts, assign=True)


def shrink_in_forward(model: Model) -> None:
    def shrink(module: nn.Module, _: object) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)

    model.units[0].register_forward_pre_hook(shrink)


def data_in_forward(model: Model) -> None:
    def inside(layer: nn.Linear) -> None:
        layer.weight.data = layer.weight.data * 2

    model.units[0].inside = inside


def flatten_in_forward(model: Model) -> None:
    """What `nn.LSTM.flatten_parameters` has cuDNN do."""

    def inside(layer: nn.Linear) -> None:
        with torch.no_grad():
            flat = torch.cat([layer.weight.flatten(), layer.bias])
            layer.weight.set_(flat[: layer.weight.numel()].view_as(layer.weight))
            layer.bias.set_(flat[layer.weight.numel() :])

    model.units[0].inside = inside


Changes = dict[Callable[[Model], None], str]

BEFORE: Changes = {
    add_hook: r"units\.0\.weight'(.|\n)*a hook",
    add_late_hook: r"units\.0\.weight'(.|\n)*a hook",
    tie_by_memory: r"units\.1\.weight'(.|\n)*same memory|units\.0\.weight'(.|\n)*same memory",
    keep_a_view: r"table'(.|\n)*table_t of module '\(root\)' lies in the same memory",
    keep_a_list: r"units\.0\.weight'(.|\n)*all_weights of module 'units\.0'",
}
IN_TRAINING: Changes = {
    add_hook: r"units\.0\.weight'(.|\n)*a hook",
    add_late_hook: r"units\.0\.weight'(.|\n)*a hook",
    shrink_in_forward: r"unit 'units\.0' writes into gathered parameters",
}
IN_EVALUATION: Changes = {
    halve: r"units\.0\.weight'(.|\n)*another tensor",
    half_of_a_bias: r"units\.2\.bias'(.|\n)*another tensor",
    a_view_of_the_same_memory: r"units\.0\.weight'(.|\n)*another tensor",
    apply: r"'table'(.|\n)*another tensor",
    parametrised: r"units\.0\.weight'(.|\n)*another object",
    weight_norm: r"units\.0\.weight'(.|\n)*another object",
    old_weight_norm: r"units\.0\.weight'(.|\n)*another object",
    assign: r"another object",
    data_in_forward: r"units\.0\.weight'(.|\n)*replaces its data in forward",
    flatten_in_forward: r"units\.0\.weight'(.|\n)*flatten_parameters",
}
IN_BOTH: Changes = {
    swap_data: r"units\.0\.weight'(.|\n)*another tensor",
    convert: r"'table'(.|\n)*another tensor",
    replace: r"units\.0\.weight'(.|\n)*another object",
}


@ranks(2)
def test_what_would_be_left_behind_when_a_model_is_sharded(rank: int) -> None:
    with open_two() as groups:
        for change, message in BEFORE.items():
            model = Model()
            change(model)
            with pytest.raises(ConfigError, match=message):
                shard_model(model, groups)
        # Side by side in one memory is no view of one another.
        model = Model()
        flat = torch.cat([unit.bias.detach() for unit in model.units])
        for unit, part in zip(model.units, flat.split([4, 4, 1]), strict=True):
            unit.bias = nn.Parameter(part)
        check_step(shard_model(model, groups), Model(), 0, rank)


@every
@ranks(2)
def test_what_buffers_would_not_follow(rank: int, strategy: str) -> None:
    """Before a first step and after one; and again after the error of an evaluation."""
    with open_two() as groups:
        for number, (change, message) in enumerate((IN_EVALUATION | IN_BOTH).items()):
            # Both for what the first strategy gathers anew each time; else in turns.
            for steps in (0, 1) if strategy == "zero3" else (number % 2,):
                model = changed(groups, strategy, change, steps)
                for _ in range(2):
                    with torch.no_grad(), pytest.raises(ConfigError, match=message):
                        loss_of(model, 9, rank)
        for change, message in (IN_TRAINING | IN_BOTH).items():
            for steps in (0, 1):
                model = changed(groups, strategy, change, steps)
                with pytest.raises(ConfigError, match=message):
                    loss_of(model, 9, rank).backward()


def changed(groups: Groups, strategy: str, change: Callable[[Model], None], steps: int) -> Model:
    """A model that was evaluated, and changed after some steps."""
    model = Model()
    sharded = shard_model(model, groups, strategy)
    for number in range(steps):
        loss_of(model, number, 0).backward()
    with torch.no_grad():
        loss_of(model, 9, 0)
    # Elsewhere `load_state_dict` is refused at once.
    with sharded.as_shards():
        change(model)
    return model


@ranks(2)
def test_copies_and_borrowed_parameters(rank: int) -> None:
    model = Model()
    with open_two() as groups:
        shard_model(model, groups)
        with pytest.raises(ConfigError, match=r"copy\.deepcopy of a sharded model"):
            copy.deepcopy(model)
        own = {"units.0.weight": torch.zeros(4, 4, dtype=torch.float64)}
        with pytest.raises(ConfigError, match="another object"):
            torch.func.functional_call(model, own, batch(0, rank))


# -- backward ----------------------------------------------------------------------------------


@both
@ranks(2)
def test_weights_and_losses_from_outside_of_their_unit(rank: int, strategy: str) -> None:
    with open_two() as groups:
        model = Model()
        # Its mean is that of a part, which no shape shows.
        model.units[0].register_forward_hook(lambda _m, _x, y: y * model.units[1].weight.mean())
        shard_model(model, groups, strategy)
        with pytest.raises(ConfigError, match=r"shard of 'units\.1\.weight'"):
            loss_of(model, 0, rank).backward()

        model, kept = Model(), list[Tensor]()
        model.units[0].register_forward_hook(lambda m, _x, _y: kept.append(m.bias * 2) and None)
        shard_model(model, groups, strategy)
        loss_of(model, 0, rank)
        with pytest.raises(ConfigError, match=r"units\.0\.bias(.|\n)*has not come to unit"):
            kept[0].sum().backward()


@both
@ranks(2)
def test_a_weight_that_is_whole_on_one_rank(rank: int, strategy: str) -> None:
    """On the other it is empty, and torch says so; all ranks are told what it is."""
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)]
    model = nn.Sequential(nn.Identity(), nn.Sequential(*layers))
    model[0].register_forward_hook(lambda _m, _x, y: y + y @ layers[0].weight.t())
    with open_two() as groups:
        shard(model, groups, units=[model[1]], reshard=STRATEGIES[strategy])
        with pytest.raises((ConfigError, PeerError, RuntimeError)) as told:
            loss_of(model, 0, rank).backward()
        notes = getattr(told.value, "__notes__", [])
        assert "this rank's shard" in " ".join([str(told.value), *notes])


@both
@ranks(2)
def test_a_gradient_of_a_gradient(rank: int, strategy: str) -> None:
    """Refused before anything is computed, and the next step goes on."""
    reference, model = Model(), Model()
    with open_two() as groups:
        sharded = shard_model(model, groups, strategy)
        x = batch(0, rank).requires_grad_()
        y = (x @ torch.ones(4, 4, dtype=torch.float64) + model(x)).sum()
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            torch.autograd.grad(y, x, create_graph=True)
        check_step(sharded, reference, 1, rank)


# -- evaluations, and values that were written ---------------------------------------------------


@ranks(2)
def test_what_is_frozen_for_an_evaluation(rank: int) -> None:
    """Weights are the same; without any that train there is nothing to do in backward."""
    with open_two() as groups:
        model, plain = Model(), Model()
        sharded = shard_model(model, groups)
        model.requires_grad_(False)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, 0, 0), loss_of(plain, 0, 0))
        assert not loss_of(model, 0, 0).requires_grad
        model.requires_grad_(True)
        check_step(sharded, plain, 0, rank)


@pytest.mark.parametrize(
    "strategy", [pytest.param(one, marks=BETWEEN.get(one, ())) for one in STAGES]
)
@ranks(2)
def test_evaluations_see_the_parameters_that_there_are(rank: int, strategy: str) -> None:
    """At each place in a step alone and at all, and what a state dict wrote; none changes it."""
    reference, model = model_of(), model_of()
    places = ("before", "in a micro-batch", "between micro-batches", "before the optimizer")

    def evaluate() -> None:
        for _ in range(2):
            with torch.no_grad():
                found, expected = (m.loss(tokens(9, 0, 0)) for m in (model, reference))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)

    with open_two() as groups:
        sharded = shard(model, groups, reshard=STRATEGIES[strategy])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
        for step, now in enumerate([*([one] for one in places for _ in range(2)), places, places]):
            if "before" in now:
                evaluate()
            for micro in range(MICRO_BATCHES):
                with sharded.accumulate(is_last=micro == MICRO_BATCHES - 1):
                    model.loss(tokens(step, micro, rank)).backward()
                    if micro == 0 and "in a micro-batch" in now:
                        # A forward without a backward.
                        model.loss(tokens(9, 0, rank))
                for r in (0, 1):
                    (reference.loss(tokens(step, micro, r)) / 2).backward()
                if micro == 0 and "between micro-batches" in now:
                    evaluate()
            if "before the optimizer" in now:
                # What it gathers is old when the optimizer has stepped.
                evaluate()
            check_gradients(sharded, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        evaluate()
        written = {name: 2 * value for name, value in reference.state_dict().items()}
        sharded.load_full_state_dict(written)
        reference.load_state_dict(written)
        evaluate()


@every
@ranks(2)
def test_what_stays_gathered_is_never_old(rank: int, strategy: str) -> None:
    """Shards that are written while parameters stay gathered for the next micro-batch."""
    x = batch(0, rank)
    with open_two() as groups:
        model, plain = Model(), Model()
        sharded = shard_model(model, groups, strategy)
        loaded = {name: 2 * value for name, value in plain.state_dict().items()}
        for _ in range(2):
            with sharded.accumulate(is_last=False):
                model(x).sum().backward()
                sharded.load_full_state_dict(loaded)
                plain.load_state_dict(loaded)
                with torch.no_grad():
                    torch.testing.assert_close(model(x), plain(x))
                torch.testing.assert_close(model(x), plain(x))
                model(x).sum().backward()
            loaded = {name: 2 * value for name, value in loaded.items()}
        with sharded.accumulate(is_last=False):
            model(x).sum().backward()
            with torch.no_grad():
                for part in sharded.parameters():
                    part.mul_(2)
            if strategy == "zero3":
                model(x)
            else:
                with pytest.raises(ConfigError, match="written after they had been gathered"):
                    model(x)
