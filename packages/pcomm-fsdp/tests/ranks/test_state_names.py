"""Names of state, whatever wrappers and hooks make of them: those of the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_support.trainings import Block, SmallModel
from pcomm.core.errors import ConfigError
from pcomm.core.groups.open_groups import open_groups
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


def tokens(rank: int) -> Tensor:
    return torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(rank))


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
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        roles = Roles(groups["dp"], groups["dp", "reduce"])
        for change in CHANGES:
            plain, other = changed_model(change), changed_model(change, seed=1)
            model, loaded = copy.deepcopy(plain), copy.deepcopy(other)
            sharded = fully_shard(model, roles, units=[Block])
            again = fully_shard(loaded, roles, units=[Block])
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
            save_checkpoint(folder, views, groups["dp"])
            load_checkpoint(folder, model_shard_views(again), groups["dp"], sharded=again)
            same(again.full_state_dict(), plain.state_dict())


@ranks(2)
def test_wrappers_do_not_show_in_a_checkpoint(rank: int, tmp_path: Path) -> None:
    """Saved with checkpoint_wrapper, trained on without it, and named as FSDP2 names it."""
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "reduce")]) as groups:
        roles = Roles(groups["dp"], groups["dp", "reduce"])
        states: list[dict[str, Any]] = []
        for change in (wrap_blocks, lambda _: None):
            model = changed_model(change, seed=len(states))
            sharded = fully_shard(model, roles, units=[Block])
            optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
            views = model_shard_views(sharded) | optimizer_shard_views(sharded, optimizer)
            if states:
                load_checkpoint(tmp_path, views, groups["dp"], sharded=sharded)
            else:
                model.loss(tokens(rank)).backward()
                optimizer.step()
                save_checkpoint(tmp_path, views, groups["dp"])
            sharded.zero_grad()
            model.loss(tokens(rank)).backward()
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
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        sharded = fully_shard(model, Roles(groups["dp"], groups["dp"]), units=[nn.Linear])
        same(sharded.full_state_dict(), plain.state_dict())
        with pytest.raises(ConfigError, match=r"hooks of the state dict make: \['0\.norm'\]"):
            model_shard_views(sharded)


@ranks(2)
def test_a_refused_state_changes_nothing(rank: int) -> None:
    model = changed_model(rename)
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        sharded = fully_shard(model, Roles(groups["dp"], groups["dp"]), units=[Block])
        before = sharded.full_state_dict()
        wrong = {name: x + 1 if isinstance(x, Tensor) else x for name, x in before.items()}
        wrong["head.weight"] = torch.zeros(3, 3)
        for state in (wrong, {n: x for n, x in wrong.items() if n != "head.weight"}):
            with pytest.raises(ConfigError, match=r"head\.weight"):
                sharded.load_full_state_dict(state)
            same(sharded.full_state_dict(), before)
