"""Models that use their weights in unusual ways have the gradients of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fsdp_support.trainings import STRATEGIES, check_gradients, open_two, shard
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp.sharded import Sharded

# B batch, D model dim

MICRO = 2


class Unit(nn.Module):
    """A linear layer, computed by a function of it and its input."""

    def __init__(self, run: Callable[..., object] | None = None, **extra: nn.Parameter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        for name, parameter in extra.items():
            self.register_parameter(name, parameter)
        self.run = run or plain

    def forward(self, *args: object, **options: object) -> object:
        return self.run(self, *args, **options)


class Model(nn.Module):
    """Units, called by a function of the model and its input; the root has a weight too."""

    def __init__(self, run: Callable[..., Tensor], *units: nn.Module) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))
        self.units = nn.ModuleList(units)
        self.run = run

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.run(self, x_BD)


@dataclass
class Outcome:
    """What a unit may return."""

    y_BD: Tensor
    extra: Tensor


def plain(unit: Unit, x_BD: Tensor) -> Tensor:
    return torch.tanh(x_BD @ unit.weight + unit.bias)


def views(unit: Unit, x_BD: Tensor) -> Tensor:
    w = unit.weight
    y_BD = x_BD @ w + x_BD @ w.t() + (x_BD[None] @ w[None])[0] + x_BD @ w.view(2, 8).view(4, 4)
    y_BD = y_BD + torch.cat([w[:1], w[1:]])[: len(x_BD)] + w[:, 1] + w.diagonal()
    return y_BD + unit.bias[:1].expand(4) + unit.bias.expand(len(x_BD), 4)


def in_place(unit: Unit, x_BD: Tensor) -> Tensor:
    y_BD = x_BD @ unit.weight
    y_BD += unit.bias
    y_BD[:, 0] *= 2
    return y_BD.add_(x_BD).tanh_()


def in_rows(unit: Unit, x_BD: Tensor) -> Tensor:
    return x_BD @ unit.weight + unit.bias


def hooked(unit: Unit, x_BD: Tensor) -> Tensor:
    weight = unit.weight.view(4, 4)
    weight.register_hook(lambda g: g * 3)
    return torch.tanh(x_BD @ weight) + unit.bias


def recomputed(unit: Unit, x_BD: Tensor, *, reentrant: bool) -> Tensor:
    y_BD = checkpoint(partial(plain, unit), x_BD, use_reentrant=reentrant)
    return y_BD + x_BD @ unit.weight


def odd_shapes(unit: Unit, x_BD: Tensor) -> Tensor:
    y_BD = plain(unit, x_BD) * unit.scale + (unit.empty.sum() + unit.one)
    return y_BD @ unit.across.reshape(4, 5).sum(1).diag() + unit.rows.square().sum()


def in_a_row(model: Model, x_BD: Tensor) -> Tensor:
    x_BD = x_BD @ model.table
    for unit in model.units:
        x_BD = unit(x_BD)
    return x_BD + model.table.sum(0)


def in_a_row_in_place(model: Model, x_BD: Tensor) -> Tensor:
    x_BD = x_BD @ model.table
    for unit in model.units:
        x_BD = unit(x_BD).mul_(1.5).tanh_()
    x_BD.retain_grad() if x_BD.requires_grad else None
    return x_BD


def often(model: Model, x_BD: Tensor) -> Tensor:
    one, two = model.units
    with torch.no_grad():
        still_BD = one(x_BD)
    y_BD = one(x_BD) + two(one(x_BD @ model.table)) + still_BD
    return one(y_BD.detach()) + one(two(y_BD))


def some_outputs(model: Model, x_BD: Tensor) -> Tensor:
    one, two = model.units
    y_BD, _ = one(x_BD @ model.table)
    _, z_BD = two(y_BD)
    return z_BD


def passed_in_vain(model: Model, x_BD: Tensor) -> Tensor:
    """What one unit computes goes into another, which makes nothing of it."""
    one, two = model.units
    return two(x_BD @ model.table, one(x_BD))


def dataclasses_out(model: Model, x_BD: Tensor) -> Tensor:
    one, two = model.units
    first = one(x_BD @ model.table)
    second = two(first.y_BD)
    return second.y_BD + first.extra + second.extra


class Held:
    """An object that nothing knows about, with one more inside."""

    __slots__ = ("extra", "inner")

    def __init__(self, y_BD: Tensor, extra: Tensor) -> None:
        self.inner, self.extra = SimpleNamespace(y_BD=y_BD, itself=self), extra


def held(unit: Unit, x_BD: Tensor) -> Held:
    return Held(x_BD @ unit.weight, unit.bias.square().sum())


def objects_out(model: Model, x_BD: Tensor) -> object:
    one, two = model.units
    first = one(x_BD @ model.table)
    second = two(first.inner.y_BD)
    y_BD = (second.inner.y_BD + first.extra + second.extra) @ model.table
    return type("Output", (), {"y_BD": y_BD})


def lent(model: Model, x_BD: Tensor) -> Tensor:
    """The root's weight, in the root and, as an argument and a view, in units."""
    for unit in model.units:
        x_BD = unit(x_BD @ model.table, model.table.t())
    return x_BD @ model.table[:, :3]


def collected(model: Model, x_BD: Tensor) -> Tensor:
    """Units leave losses in a list, and what a later one reads in a dict."""
    losses: list[Tensor] = []
    seen: dict[str, Any] = {"inner": [x_BD @ model.table]}
    x_BD = seen["inner"][0]
    for unit in model.units:
        before = seen["inner"][0]
        unit(x_BD, losses, seen=seen)
        assert seen["inner"][0] is before
        x_BD = seen["newest"]
    assert len(losses) == len(seen["inner"]) - 1 == len(model.units)
    return x_BD + sum(losses) + sum(seen["inner"])


def all_again(model: Model, x_BD: Tensor, *, reentrant: bool) -> Tensor:
    x_BD = x_BD @ model.table
    for unit in model.units:
        x_BD = checkpoint(unit, x_BD, use_reentrant=reentrant)
    return x_BD


def both(unit: Unit, x_BD: Tensor) -> tuple[Tensor, Tensor]:
    return x_BD @ unit.weight, x_BD + unit.bias


def outcome(unit: Unit, x_BD: Tensor) -> Outcome:
    return Outcome(x_BD @ unit.weight, unit.bias.square().sum())


def ignoring(unit: Unit, x_BD: Tensor, _: Tensor) -> Tensor:
    return plain(unit, x_BD)


def with_loan(unit: Unit, x_BD: Tensor, table: Tensor) -> Tensor:
    return torch.tanh(x_BD @ unit.weight @ table) + unit.bias


def collecting(unit: Unit, x_BD: Tensor, losses: list[Tensor], *, seen: dict[str, Any]) -> None:
    seen["newest"] = torch.tanh(x_BD @ unit.weight + seen["inner"][-1])
    seen["inner"].append(x_BD * unit.bias)
    losses.append(unit.weight.square().mean() + x_BD.mean())


def odd_unit() -> Unit:
    return Unit(
        odd_shapes,
        scale=nn.Parameter(torch.tensor(0.7)),
        empty=nn.Parameter(torch.zeros(0, 3)),
        one=nn.Parameter(torch.randn(1)),
        across=nn.Parameter(torch.randn(5, 4).t()),
        rows=nn.Parameter(torch.randn(3, 2, 1)),
    )


class Outer(Unit):
    """A unit around a unit, with a weight used before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Unit()

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.inner(x_BD @ self.weight) @ self.weight + self.bias


class Recurrent(nn.Module):
    """Torch's LSTM holds its weights in a list of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.lstm(x_BD[None])[0][0]


class Frozen(Unit):
    """One of two weights is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.bias.requires_grad = False


UNITS = (Unit, Recurrent, nn.Sequential, Outer, Frozen)
GRAPHS: dict[str, Callable[[], Model]] = {
    "views": lambda: Model(in_a_row, Unit(views), Unit(views)),
    "in place": lambda: Model(in_a_row, Unit(in_place), Unit(in_place)),
    "in place on outputs": lambda: Model(in_a_row_in_place, Unit(in_rows), Unit(in_rows)),
    "hooks in forward": lambda: Model(in_a_row, Unit(hooked), Unit(hooked)),
    "odd shapes": lambda: Model(in_a_row, odd_unit(), odd_unit()),
    "units in units": lambda: Model(in_a_row, Outer(), Outer()),
    "lists of weights": lambda: Model(in_a_row, Recurrent(), Recurrent()),
    "frozen parts": lambda: Model(in_a_row, Frozen(), Unit(), Frozen()),
    "called often": lambda: Model(often, Unit(), Unit()),
    "some outputs": lambda: Model(some_outputs, Unit(both), Unit(both)),
    "an input in vain": lambda: Model(passed_in_vain, Unit(views), Unit(ignoring)),
    "dataclasses": lambda: Model(dataclasses_out, Unit(outcome), Unit(outcome)),
    "objects": lambda: Model(objects_out, Unit(held), Unit(held)),
    "weights lent to units": lambda: Model(lent, Unit(with_loan), Unit(with_loan)),
    "lists and dicts that units fill": lambda: Model(
        collected, Unit(collecting), Unit(collecting), Unit(collecting)
    ),
    "computed weights": lambda: Model(
        in_a_row, *(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))) for _ in "ab")
    ),
    "recomputed inside": lambda: Model(
        in_a_row, *(Unit(partial(recomputed, reentrant=False)) for _ in "ab")
    ),
    "recomputed inside, reentrant": lambda: Model(
        in_a_row, *(Unit(partial(recomputed, reentrant=True)) for _ in "ab")
    ),
    "recomputed": lambda: Model(partial(all_again, reentrant=False), Unit(views), Unit(in_place)),
    "recomputed, reentrant": lambda: Model(partial(all_again, reentrant=True), Unit(views), Unit()),
}


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x_BD: Tensor) -> Tensor:
    found = model(x_BD)
    return (found if isinstance(found, Tensor) else found.y_BD).square().mean()


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def plain_step(model: nn.Module, step: int) -> None:
    for micro in range(MICRO):
        for rank in (0, 1):
            (loss_of(model, batch(step, micro, rank)) / 2).backward()


def sharded_step(sharded: Sharded, step: int, rank: int) -> None:
    for micro in range(MICRO):
        with sharded.accumulate(is_last=micro == MICRO - 1):
            loss_of(sharded.model, batch(step, micro, rank)).backward()


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@ranks(2)
def test_gradients_are_those_of_one_process(rank: int, strategy: str) -> None:
    with open_two() as groups:
        for graph, build in GRAPHS.items():
            reference, model = built(build), built(build)
            units = [m for m in model.modules() if type(m) in UNITS]
            sharded = shard(model, groups, units=units, reshard=STRATEGIES[strategy])
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
            # The first is recorded, the others are replayed with new weights: of ZeRO-3 once with
            # gradients that were dropped, and of both with those that were set to zero.
            steps = 3 if strategy == "zero3" else 2
            for step in range(steps):
                plain_step(reference, step)
                sharded_step(sharded, step, rank)
                check_gradients(sharded, reference, f"{graph}, step {step}")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step < steps - 2)


class Hidden(nn.Module):
    """Its loss is where no hook finds it: in what a function has closed over."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit, self.head = unit, nn.Linear(4, 4)

    def forward(self, x_BD: Tensor) -> Callable[[], Tensor]:
        loss = self.head(self.unit(x_BD)).square().mean()
        return lambda: loss


@ranks(2)
def test_a_loss_that_no_hook_finds_reads_no_freed_memory(rank: int) -> None:
    for kind in (nn.Linear(4, 4), nn.Bilinear(4, 4, 4), nn.Sequential(nn.Linear(4, 4))):
        with open_two() as groups:
            unit = Twice(kind) if isinstance(kind, nn.Bilinear) else kind
            model = Hidden(unit)
            shard(model, groups, units=[unit])
            loss = model(torch.randn(3, 4))()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.inner(x_BD, x_BD)


class Empty(nn.Module):
    """All of its parameters are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.none.sum()


@ranks(2)
def test_units_without_an_element(rank: int) -> None:
    with open_two() as groups:
        model, reference = (nn.Sequential(nn.Linear(4, 4), Empty()).double() for _ in "ab")
        reference.load_state_dict(model.state_dict())
        sharded = shard(model, groups, units=[nn.Linear, Empty])
        for _ in range(2):
            sharded.zero_grad()
            reference.zero_grad()
            for one in (model, reference):
                one(torch.ones(2, 4).double()).sum().backward()
        assert sharded.full_state_dict()["1.none"].shape == (0, 3)
