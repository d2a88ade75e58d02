"""Training that is saved and goes on has the bits of training that went on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core.errors import ConfigError, DivergenceError
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.checkpoint import (
    load_checkpoint,
    model_shard_views,
    optimizer_shard_views,
    save_checkpoint,
)
from pcomm.fsdp.settings import Roles
from pcomm.fsdp.sharded import Sharded


class Counting(Optimizer):
    """SGD whose rate depends on state of every plain kind."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "rate": 1.0, "past": [], "pair": (1, 2.5), "cap": None}
                    state |= {"scale": torch.ones(()), "kind": "sgd", "nested": {"a": [True]}}
                state["step"] += 1
                state["rate"] *= 0.7
                state["past"] = [*state["past"][-1:], state["rate"]]
                state["scale"] = state["scale"] * 0.5
                assert state["pair"] == (1, 2.5)
                assert state["cap"] is None
                assert state["nested"] == {"a": [True]}
                rate = group["lr"] * sum(state["past"]) * float(state["scale"]) / state["step"]
                p.sub_(p.grad, alpha=rate)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.4, weight_decay=0.1),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, fused=True),
    "Adam tensor rate": lambda p: torch.optim.Adam(p, torch.tensor(0.1), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1, t0=1.0),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3),
    "plain state": Counting,
}
# Their state is of kinds that those above have: tensors of zeros, and a count.
MORE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD nesterov": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
}
STEPS = 4


def begin(groups: Groups, make: Callable[[Any], Optimizer]) -> tuple[Sharded, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    roles = Roles(groups["dp"], groups["dp", "reduce"])
    sharded = fully_shard(model, roles, units=[nn.Linear])
    return sharded, make(sharded.parameters())


def train_steps(sharded: Sharded, optimizer: Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        sharded.model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def views_of(sharded: Sharded, optimizer: Optimizer) -> dict[str, Any]:
    return {**model_shard_views(sharded), **optimizer_shard_views(sharded, optimizer)}


Runs = dict[str, tuple[Sharded, Optimizer]]


def begin_all(groups: Groups, makers: Mapping[str, Callable[[Any], Optimizer]]) -> Runs:
    """A run with each optimizer."""
    return {name: begin(groups, make) for name, make in makers.items()}


def train_all(runs: Runs, rank: int, steps: range) -> None:
    for sharded, optimizer in runs.values():
        train_steps(sharded, optimizer, rank, steps)


def views_of_all(runs: Runs) -> dict[str, Any]:
    """The views of all runs, which are saved together: each checkpoint takes long."""
    return {
        f"{name}: {key}": view for name, run in runs.items() for key, view in views_of(*run).items()
    }


def check_same(found: Runs, expected: Mapping[str, Mapping[str, Tensor]], message: str) -> None:
    assert found.keys() == expected.keys()
    for name, (sharded, _) in found.items():
        state = sharded.full_state_dict()
        for key, value in expected[name].items():
            assert torch.equal(state[key], value), f"{name}, {message}: {key}"


@pytest.mark.parametrize(
    "more", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["kinds of state", "more"]
)
@ranks(2)
def test_a_resumed_run_has_the_bits_of_one(rank: int, tmp_path: Path, more: bool) -> None:
    """Saved before the first step, after it, and later; saving changes nothing, either."""
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        makers = MORE if more else OPTIMIZERS
        one = begin_all(groups, makers)
        train_all(one, rank, range(STEPS))
        expected = {name: sharded.full_state_dict() for name, (sharded, _) in one.items()}

        saved = begin_all(groups, makers)
        early = views_of_all(saved)
        for step in range(STEPS):
            # Those of before the first step serve as well as new ones.
            views = early if step % 2 else views_of_all(saved)
            if step in (0, 1, 2):
                save_checkpoint(tmp_path / str(step), views, groups["dp"])
            train_all(saved, rank, range(step, step + 1))
        check_same(saved, expected, "saved")

        for step in (0, 1, 2):
            resumed = begin_all(groups, makers)
            if step == 2:
                # State that is there already gives way.
                train_all(resumed, rank, range(2))
            load_checkpoint(tmp_path / str(step), views_of_all(resumed), groups["dp"])
            for sharded, _ in resumed.values():
                # As `load_checkpoint` does for the one model that it is given.
                sharded.parameters_changed()
            train_all(resumed, rank, range(step, STEPS))
            check_same(resumed, expected, f"resumed at {step}")


@ranks(2)
def test_a_run_begins_anew(rank: int, tmp_path: Path) -> None:
    """A checkpoint of before the first step takes state away that came after it."""
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        sharded, optimizer = begin(groups, OPTIMIZERS["SGD momentum"])
        save_checkpoint(tmp_path, views_of(sharded, optimizer), groups["dp"])
        train_steps(sharded, optimizer, rank, range(3))
        expected = sharded.full_state_dict()
        load_checkpoint(tmp_path, views_of(sharded, optimizer), groups["dp"], sharded=sharded)
        train_steps(sharded, optimizer, rank, range(3))
        found = sharded.full_state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@ranks(2)
def test_state_that_cannot_be_saved(rank: int, tmp_path: Path) -> None:
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        for key, value, error, found in (
            ("norm", float(rank), DivergenceError, r"0\.0\]? on rank 0, \[?1\.0"),
            ("norm", torch.tensor(float(rank)), DivergenceError, r"0\.0\]? on rank 0, \[?1\.0"),
            ("rows", {1, 2}, ConfigError, "a value of type set"),
            ("rows", torch.ones(9), ConfigError, r"of shape \(9,\)"),
        ):
            sharded, optimizer = begin(groups, OPTIMIZERS["SGD momentum"])
            train_steps(sharded, optimizer, rank, range(1))
            for state in optimizer.state.values():
                state[key] = value
            with pytest.raises(error, match=found):
                save_checkpoint(tmp_path, views_of(sharded, optimizer), groups["dp"])
            # What is left out by name does not stand in the way.
            kept = optimizer_shard_views(sharded, optimizer, keys=["momentum_buffer"])
            save_checkpoint(tmp_path, kept, groups["dp"])


@ranks(2)
def test_a_schedule_of_rates_and_hooks_are_left_alone(rank: int) -> None:
    """Asking for views before the first step is no step."""
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        sharded, optimizer = begin(groups, OPTIMIZERS["Adam tensor rate"])
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        called: list[int] = []
        optimizer.register_step_pre_hook(lambda *_: called.append(1))
        before = [part.clone() for part in sharded.parameters()]
        optimizer_shard_views(sharded, optimizer)
        assert not optimizer.state
        assert not called
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
        assert all(map(torch.equal, before, sharded.parameters()))
        assert all(part.grad is None for part in sharded.parameters())
