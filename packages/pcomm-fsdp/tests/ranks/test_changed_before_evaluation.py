"""A model that was changed after it was sharded is never evaluated with old weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fsdp_support.trainings import STRATEGIES, ZERO
from pcomm.core.errors import ConfigError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles


class Layer(nn.Linear):
    """A linear layer that does something to itself in forward, when told."""

    inside: Callable[[nn.Linear], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.inside is not None:
            self.inside(self)
        return super().forward(x)


class Model(nn.Module):
    """Two units and a weight of the root. The second unit's bias is on one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(4, 4))
        self.units = nn.ModuleList([Layer(4, 4), Layer(4, 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x


def convert(model: Model) -> None:
    model.double()


def halve(model: Model) -> None:
    model.units[0].half()


def half_of_a_bias(model: Model) -> None:
    model.units[1].bias.data = model.units[1].bias.data.half()


def swap_data(model: Model) -> None:
    model.units[0].weight.data = model.units[0].weight.data * 2


def a_view_of_the_same_memory(model: Model) -> None:
    model.units[0].weight.data = model.units[0].weight.data[:0]


def apply(model: Model) -> None:
    model._apply(lambda x: x * 2)


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


CHANGES: dict[Callable[[Model], None], str] = {
    convert: "'table'(.|\n)*another tensor",
    halve: r"units\.0\.weight'(.|\n)*another tensor",
    half_of_a_bias: r"units\.1\.bias'(.|\n)*another tensor",
    swap_data: r"units\.0\.weight'(.|\n)*another tensor",
    a_view_of_the_same_memory: r"units\.0\.weight'(.|\n)*another tensor",
    apply: r"'table'(.|\n)*another tensor",
    parametrised: r"units\.0\.weight'(.|\n)*another object",
    weight_norm: r"units\.0\.weight'(.|\n)*another object",
    old_weight_norm: r"units\.0\.weight'(.|\n)*another object",
    assign: r"another object",
    data_in_forward: r"units\.0\.weight'(.|\n)*replaces its data in forward",
    flatten_in_forward: r"units\.0\.weight'(.|\n)*flatten_parameters",
}


@pytest.mark.parametrize("strategy", ZERO)
@ranks(2)
def test_evaluation_refuses_what_buffers_would_not_follow(rank: int, strategy: str) -> None:
    """Before a first step and after one, and again after the error."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        roles = Roles(groups["dp"], groups["dp", "reduce"])
        for number, (change, message) in enumerate(CHANGES.items()):
            # Both for what the first strategy gathers anew each time; else in turns.
            for steps in (0, 1) if strategy == "zero3" else (number % 2,):
                model = Model()
                strategy_of = STRATEGIES[strategy]
                sharded = fully_shard(model, roles, units=[Layer], reshard=strategy_of)
                for _ in range(steps):
                    model(x).sum().backward()
                with torch.no_grad():
                    model(x)
                # Elsewhere `load_state_dict` is refused at once.
                with sharded.as_shards():
                    change(model)
                for _ in range(2):
                    with torch.no_grad(), pytest.raises(ConfigError, match=message):
                        model(x)


@ranks(2)
def test_what_is_frozen_for_an_evaluation(rank: int) -> None:
    """Weights are the same; without any that train there is nothing to do in backward."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        model, plain = Model(), Model()
        fully_shard(model, Roles(groups["dp"], groups["dp"]), units=[Layer])
        model.requires_grad_(False)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
        assert not model(x).requires_grad
        model.requires_grad_(True)
        model(x).sum().backward()


@pytest.mark.parametrize("strategy", ZERO)
@ranks(2)
def test_what_stays_gathered_is_never_old(rank: int, strategy: str) -> None:
    """Shards that are written while parameters stay gathered for the next micro-batch."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        model, plain = Model(), Model()
        roles = Roles(groups["dp"], groups["dp"])
        sharded = fully_shard(model, roles, units=[Layer], reshard=STRATEGIES[strategy])
        loaded = {name: 2 * value for name, value in plain.state_dict().items()}
        for _ in range(2):
            with sharded.accumulate(is_last=False):
                model(x).sum().backward()
                sharded.load_full_state_dict(loaded)
                plain.load_state_dict(loaded)
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
