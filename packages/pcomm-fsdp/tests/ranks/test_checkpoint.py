"""State that is saved: the names of the unsharded model, and the bits of a run that went on."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import Optimizer

from fsdp_support.trainings import SmallModel, open_two, shard, tokens, train_and_save
from pcomm.core.errors import ConfigError, DivergenceError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.testing.on_ranks import RankPool, default_group, ranks
from pcomm.fsdp.checkpoint import (
    load_checkpoint,
    model_shard_views,
    optimizer_shard_views,
    save_checkpoint,
)
from pcomm.fsdp.settings import ReshardPolicy
from pcomm.fsdp.sharded import Sharded

# -- a run that is saved by some ranks goes on, to the last bit but rounding, on others ---------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, ReshardPolicy.zero3(), 2), (3, ReshardPolicy.zero3(), 1)),
        ((3, ReshardPolicy.zero1(), 1), (1, ReshardPolicy.zero3(), 1)),
        ((1, ReshardPolicy.zero3(), 1), (2, ReshardPolicy.zero2(), 2)),
    ],
    ids=str,
)
def test_other_ranks_go_on(
    before: tuple[int, ReshardPolicy, int],
    after: tuple[int, ReshardPolicy, int],
    tmp_path: Path,
    rank_pool: RankPool,
) -> None:
    folder = tmp_path / "saved"
    for (size, reshard, replicas), steps in ((before, range(2)), (after, range(2, 4))):
        arguments = size, reshard, folder, steps, replicas
        if size == 1:
            found = train_and_save(*arguments)
        else:
            found = rank_pool.run(train_and_save, size, *arguments)[0]
    torch.manual_seed(0)
    model = SmallModel(is_tied=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model.loss(torch.randint(7, (12, 5), generator=generator)).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)


@ranks(2)
def test_a_checkpoint_of_another_model(rank: int, tmp_path: Path) -> None:
    with open_two() as groups:
        saved = shard(SmallModel(), groups)
        save_checkpoint(tmp_path / "saved", model_shard_views(saved), groups["dp", "gather"])
        other = shard(SmallModel(dim=6), groups)
        with pytest.raises(ConfigError, match=r"shape \(5, 16\) under that name"):
            load_checkpoint(tmp_path / "saved", model_shard_views(other), groups["dp", "gather"])


class Malice:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.makedirs, (str(self.folder), 0o777, True)


@ranks(2)
def test_an_index_that_would_run_a_program(rank: int, tmp_path: Path) -> None:
    saved, trap = tmp_path / "saved", tmp_path / "trap"
    with open_two() as groups:
        sharded = shard(SmallModel(), groups)
        save_checkpoint(saved, model_shard_views(sharded), groups["dp", "gather"])
        if rank == 0:
            index = pickle.loads((saved / ".metadata").read_bytes())
            index.planner_data = Malice(trap)
            (saved / ".metadata").write_bytes(pickle.dumps(index))
            # It is a real one: torch's own reader runs it.
            FileSystemReader(saved).read_metadata()
            trap.rmdir()
        groups["dp", "gather"].collectives.all_reduce(torch.zeros(1))
        with pytest.raises(ConfigError, match=r"it names \S*makedirs, which is not part"):
            load_checkpoint(saved, model_shard_views(sharded), groups["dp", "gather"])
        assert not trap.exists()


@ranks(3)
def test_buffers_of_one_rank_are_saved_together(rank: int, tmp_path: Path) -> None:
    """Not the mean of one rank and the variance of another: ranks saw other batches."""
    with open_two(3) as groups:
        model = nn.Sequential(nn.BatchNorm1d(64, affine=False), nn.Linear(64, 6))
        sharded = shard(model, groups, units=[nn.Linear])
        model(torch.randn(9, 64, generator=torch.Generator().manual_seed(rank)))
        save_checkpoint(tmp_path / "saved", model_shard_views(sharded), groups["dp", "gather"])
        model(torch.randn(9, 64))
        load_checkpoint(
            tmp_path / "saved", model_shard_views(sharded), groups["dp", "gather"], sharded=sharded
        )
    first = nn.BatchNorm1d(64, affine=False)
    first(torch.randn(9, 64, generator=torch.Generator().manual_seed(0)))
    for name, expected in first.named_buffers():
        assert torch.equal(getattr(model[0], name), expected), name


# -- training that is saved and goes on has the bits of training that went on -------------------


class Counting(Optimizer):
    """SGD whose rate depends on state of every plain kind."""

    # Said, since it is right: the trial of an optimizer that is not torch's takes long.
    is_elementwise = True

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
STEPS = 4


def begin(groups: Groups, make: Callable[[Any], Optimizer]) -> tuple[Sharded, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    sharded = shard(model, groups, units=[nn.Linear])
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


def begin_all(groups: Groups) -> Runs:
    """A run with each optimizer."""
    return {name: begin(groups, make) for name, make in OPTIMIZERS.items()}


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


@ranks(2)
def test_a_resumed_run_has_the_bits_of_one(rank: int, tmp_path: Path) -> None:
    """Saved before the first step, after it, and later; saving changes nothing, either."""
    with open_two() as groups:
        one = begin_all(groups)
        train_all(one, rank, range(STEPS))
        expected = {name: sharded.full_state_dict() for name, (sharded, _) in one.items()}

        saved = begin_all(groups)
        early = views_of_all(saved)
        for step in range(STEPS):
            # Those of before the first step serve as well as new ones.
            views = early if step % 2 else views_of_all(saved)
            if step in (0, 1, 2):
                save_checkpoint(tmp_path / str(step), views, groups["dp", "gather"])
            train_all(saved, rank, range(step, step + 1))
        check_same(saved, expected, "saved")

        for step in (0, 1, 2):
            resumed = begin_all(groups)
            if step != 1:
                # State that is there already gives way, also to none at all.
                train_all(resumed, rank, range(2))
            load_checkpoint(tmp_path / str(step), views_of_all(resumed), groups["dp", "gather"])
            for sharded, _ in resumed.values():
                # As `load_checkpoint` does for the one model that it is given.
                sharded.parameters_changed()
            train_all(resumed, rank, range(step, STEPS))
            check_same(resumed, expected, f"resumed at {step}")


@ranks(2)
def test_state_that_cannot_be_saved(rank: int, tmp_path: Path) -> None:
    with open_two() as groups:
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
                save_checkpoint(tmp_path, views_of(sharded, optimizer), groups["dp", "gather"])
            # What is left out by name does not stand in the way.
            kept = optimizer_shard_views(sharded, optimizer, keys=["momentum_buffer"])
            save_checkpoint(tmp_path, kept, groups["dp", "gather"])


@ranks(2)
def test_a_schedule_of_rates_and_hooks_are_left_alone(rank: int) -> None:
    """Asking for views before the first step is no step."""
    with open_two() as groups:
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


# -- names of state, whatever wrappers and hooks make of them: those of the unsharded model -----


class Renamed(nn.Module):
    """A layer that saves its weight in parts under other names, and counts in an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        return x + (x @ self.weight.T) @ self.weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}w"] = destination.pop(f"{prefix}weight")

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *rest)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Copies(nn.Linear):
    """A layer that copies when it loads, whatever it is told, and so needs memory to copy into."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}weight"])
            self.bias.copy_(state[f"{prefix}bias"])


def wrap_blocks(model: SmallModel) -> None:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(block)


def wrap_inside(model: SmallModel) -> None:
    apply_activation_checkpointing(model, check_fn=lambda one: isinstance(one, nn.LayerNorm))


def compile_blocks(model: SmallModel) -> None:
    for place in range(2):
        model.blocks[place] = torch.compile(model.blocks[place], backend="eager")  # type: ignore[assignment]


def rename(model: SmallModel) -> None:
    renamed = Renamed()
    renamed.calls = int(torch.randint(1000, ()))
    model.blocks.append(renamed)


def copying(model: SmallModel) -> None:
    model.norm = nn.Sequential(model.norm, Copies(5, 5))  # type: ignore[assignment]


CHANGES: list[Callable[[SmallModel], None]] = [
    wrap_blocks,
    wrap_inside,
    compile_blocks,
    rename,
    copying,
]


def changed_model(change: Callable[[SmallModel], None], seed: int = 0) -> SmallModel:
    torch.manual_seed(seed)
    model = SmallModel()
    change(model)
    return model.double()


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@ranks(2)
def test_state_is_that_of_the_unsharded_model(rank: int, tmp_path: Path) -> None:
    with open_two() as groups:
        for change in CHANGES:
            plain, other = changed_model(change), changed_model(change, seed=1)
            model, loaded = copy.deepcopy(plain), copy.deepcopy(other)
            sharded = shard(model, groups)
            again = shard(loaded, groups)
            same(sharded.full_state_dict(), plain.state_dict())

            again.load_full_state_dict(plain.state_dict())
            same(again.full_state_dict(), plain.state_dict())
            again.load_full_state_dict(other.state_dict())

            # One file of shards, with names that need no wrapper.
            views = model_shard_views(sharded)
            assert not [name for name in views if "_checkpoint" in name or "_orig" in name]
            shapes = [tuple(r.logical_shape) for n, r in views.items() if "extra" not in n]
            expected = [tuple(p.shape) for p in (*plain.parameters(), *plain.buffers())]
            assert sorted(shapes) == sorted(expected)
            folder = tmp_path / change.__name__
            save_checkpoint(folder, views, groups["dp", "gather"])
            for group in (groups["dp", "gather"], default_group(), init_device_mesh("cpu", (2,))):
                again.load_full_state_dict(other.state_dict())
                load_checkpoint(folder, model_shard_views(again), group, sharded=again)
                same(again.full_state_dict(), plain.state_dict())


@ranks(2)
def test_wrappers_do_not_show_in_a_checkpoint(rank: int, tmp_path: Path) -> None:
    """Saved with checkpoint_wrapper, trained on without it, and named as FSDP2 names it."""
    with open_two() as groups:
        states: list[dict[str, Any]] = []
        for change in (wrap_blocks, lambda _: None):
            model = changed_model(change, seed=len(states))
            sharded = shard(model, groups)
            optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
            views = model_shard_views(sharded) | optimizer_shard_views(sharded, optimizer)
            if states:
                load_checkpoint(tmp_path, views, groups["dp", "gather"], sharded=sharded)
            else:
                model.loss(tokens(0, 0, rank)).backward()
                optimizer.step()
                save_checkpoint(tmp_path, views, groups["dp", "gather"])
            sharded.zero_grad()
            model.loss(tokens(0, 0, rank)).backward()
            optimizer.step()
            states.append(sharded.full_state_dict())
        same(states[1], states[0])
    theirs = changed_model(wrap_blocks)
    mesh = init_device_mesh("cpu", (2,))
    fsdp2(theirs, mesh=mesh)
    assert {f"model.{name}" for name in get_model_state_dict(theirs)} == {
        name for name in views if name.startswith("model.")
    }


@ranks(2)
def test_a_hook_that_computes(rank: int) -> None:
    """The whole state has what the hook makes of whole parameters; views refuse."""

    def halve(module: nn.Module, state: dict[str, Any], prefix: str, _meta: object) -> None:
        state[f"{prefix}norm"] = state.pop(f"{prefix}weight").norm()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain[0]._register_state_dict_hook(halve)
    model = copy.deepcopy(plain)
    with open_two() as groups:
        sharded = shard(model, groups, units=[nn.Linear])
        same(sharded.full_state_dict(), plain.state_dict())
        with pytest.raises(ConfigError, match=r"hooks of the state dict make: \['0\.norm'\]"):
            model_shard_views(sharded)


@ranks(2)
def test_a_refused_state_changes_nothing(rank: int) -> None:
    model = changed_model(rename)
    with open_two() as groups:
        sharded = shard(model, groups)
        before = sharded.full_state_dict()
        wrong = {name: x + 1 if isinstance(x, Tensor) else x for name, x in before.items()}
        wrong["head.weight"] = torch.zeros(3, 3)
        for state in (wrong, {n: x for n, x in wrong.items() if n != "head.weight"}):
            with pytest.raises(ConfigError, match=r"head\.weight"):
                sharded.load_full_state_dict(state)
            same(sharded.full_state_dict(), before)
