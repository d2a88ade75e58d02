"""What a sharded model holds goes with it, or with its groups, whichever ends first."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.distributed import distributed_c10d

from fsdp_support.trainings import (
    TOKENS,
    Block,
    SmallModel,
    accumulated_step,
    flat_groups,
    open_two,
    roles_of,
    shard,
    throw,
)
from pcomm.core.errors import ClosedError, PcommError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import wait_until
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.runtime.param_group import ParamGroup
from pcomm.fsdp.settings import ReshardPolicy, Roles, Scope
from pcomm.fsdp.sharded import Sharded


def held_by(sharded: Sharded) -> list[weakref.ref[object]]:
    """All that should go: parameters of all kinds, buffers, guards, groups and the runtime."""
    model, runtime = sharded.model, sharded._runtime
    things: list[object] = [model, runtime, *model.buffers(), *flat_groups(sharded)]
    for group in flat_groups(sharded):
        shard_of, unsharded = group.shard, group.unsharded
        things += [shard_of, unsharded, group.gradients, unsharded.guard]
        things += [*shard_of.parameters, *unsharded.parameters, shard_of.flat, unsharded.flat]
        things += [group.plan.gather.process_group, group.plan.reduce.process_group]
    return [weakref.ref(thing) for thing in things]


def alive(held: list[weakref.ref[object]]) -> list[str]:
    return [type(one()).__name__ for one in held if one() is not None]


# -- runs one after another --------------------------------------------------------------------


def train_two_steps(model: SmallModel, sharded: Sharded) -> None:
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    for _ in range(2):
        accumulated_step(model, sharded)
        sharded.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_and_read(model: SmallModel, sharded: Sharded) -> None:
    """Ends with forwards that have no backward."""
    train_two_steps(model, sharded)
    with torch.no_grad():
        model.loss(TOKENS)
    model.loss(TOKENS).item()


def raise_in_forward(model: SmallModel, sharded: Sharded) -> None:
    train_two_steps(model, sharded)
    model.blocks[2].up.register_forward_hook(throw)
    with pytest.raises(ArithmeticError):
        model.loss(TOKENS)


def raise_in_backward(model: SmallModel, sharded: Sharded) -> None:
    train_two_steps(model, sharded)
    model.blocks[1].register_forward_hook(lambda *a: a[2].register_hook(throw) and None)
    with pytest.raises(ArithmeticError):
        model.loss(TOKENS).backward()


def give_up_within_a_step(model: SmallModel, sharded: Sharded) -> None:
    train_two_steps(model, sharded)
    with sharded.accumulate(is_last=False):
        model.loss(TOKENS).backward()


RUNS: list[Callable[[SmallModel, Sharded], object]] = [
    train_two_steps,
    train_and_read,
    raise_in_forward,
    raise_in_backward,
    give_up_within_a_step,
]


def hold_after_all() -> list[weakref.ref[object]]:
    held = []
    with open_two() as groups:
        for do in RUNS:
            for strategy in (ReshardPolicy.zero3(), ReshardPolicy.zero1()):
                model = SmallModel()
                sharded = shard(model, groups, reshard=strategy)
                do(model, sharded)
                held += held_by(sharded)
    return held


def count() -> dict[str, int]:
    return {
        "python threads": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "communicators": len(distributed_c10d._world.pg_map),
        "parameter groups": sum(type(thing) is ParamGroup for thing in gc.get_objects()),
    }


@ranks(2)
def test_a_second_run_leaves_no_more_than_the_first(rank: int) -> None:
    counts = []
    for _ in range(2):
        held = hold_after_all()
        gc.collect()
        assert alive(held) == []
        counts.append(count())
    assert counts[0] == counts[1]
    assert counts[0]["parameter groups"] == 0


@ranks(2)
def test_a_model_that_is_dropped_goes_before_its_groups(rank: int) -> None:
    with open_two() as groups:
        for _ in range(2):
            model = SmallModel()
            held = held_by(shard(model, groups))
            loss = model.loss(TOKENS)
            del model
            gc.collect()
            # The graph keeps the gathered parameters and the buffer that it was made of.
            assert set(alive(held)) == {"ProcessGroup", "Parameter", "Tensor"}
            with pytest.raises(ClosedError, match="closed or deleted after its forward"):
                loss.backward()
            del loss
            gc.collect()
            # Gloo's thread lets go of the tensors of an operation after it has told its end.
            wait_until(lambda held=held: set(alive(held)) == {"ProcessGroup"}, "the end of tensors")


@ranks(2)
def test_nothing_goes_that_is_still_used(rank: int) -> None:
    """The model alone keeps all that it needs, and so does what `fully_shard` returned."""
    with open_two() as groups:
        model = SmallModel()
        shard(model, groups)
        gc.collect()
        model.loss(TOKENS).backward()
        sharded = shard(SmallModel(), groups)
        gc.collect()
        sharded.model.loss(TOKENS).backward()
        assert sharded.full_gradients()


# -- closing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["itself", "its groups"])
@ranks(2)
def test_a_closed_model_says_so(rank: int, by: str) -> None:
    groups = open_two()
    model = SmallModel()
    sharded = shard(model, groups, entry_points=["forward", "loss"])
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    for _ in range(2):
        model.loss(TOKENS).backward()
    loss = model.loss(TOKENS)
    wholes = [
        weakref.ref(whole) for group in flat_groups(sharded) for whole in group.unsharded.parameters
    ]
    groups_held = [weakref.ref(group) for group in flat_groups(sharded)]
    steps = sharded.schedule
    parts = [part.data_ptr() for part in sharded.parameters()]
    (sharded if by == "itself" else groups).close()
    gc.collect()
    assert alive(groups_held) == []
    with pytest.raises(ClosedError, match="closed or deleted after its forward"):
        loss.backward()
    del loss
    gc.collect()
    assert alive(wholes) == []
    calls: list[Callable[[], object]] = [
        lambda: model(TOKENS),
        lambda: model.loss(TOKENS),
        lambda: model.blocks[0](torch.zeros(1, 1, 5)),
        sharded.full_state_dict,
        sharded.grad_norm,
        lambda: list(sharded.parameters()),
        sharded.zero_grad,
        sharded.memory,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match=r"closed(.|\n)*inside the `with` block"):
            call()
        assert issubclass(ClosedError, PcommError)
    # What is this rank's own stays: parts, what the optimizer does with them, and what was planned.
    assert [part.data_ptr() for part in model.parameters()] == parts
    optimizer.step()
    assert sharded.schedule == steps
    assert "schedule" in str(sharded.report())
    sharded.close()
    groups.close()
    groups.close()


@ranks(2)
def test_two_models_of_the_same_groups_close_one_by_one(rank: int) -> None:
    with open_two() as groups:
        first, second = SmallModel(), SmallModel()
        shard(first, groups).close()
        sharded = shard(second, groups)
        second.loss(TOKENS).backward()
        sharded.close()
        with pytest.raises(ClosedError):
            second.loss(TOKENS)


@ranks(2)
def test_parameters_of_one_rank_are_as_they_were_before(rank: int) -> None:
    """Nothing was sharded, so nothing refuses; and nothing is divided any more."""
    alone = Topology({"one": 1, "dp": 2})
    model, plain = SmallModel(), SmallModel()
    plain.load_state_dict(model.state_dict())
    with open_groups(alone, ["one", ("dp", "gather"), ("dp", "reduce")]) as groups:
        roles = Roles(groups["one"], groups["one"])
        everything = Scope(lambda *_: True, roles, divisor=4)
        dense = roles_of(groups)
        sharded = fully_shard(model, dense, units=[Block], scopes={"own": everything})
        model.loss(TOKENS).backward()
        assert sharded.memory()["gathered"] == 0
        divided = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
    for one in (model, plain):
        one.loss(TOKENS).backward()
    for parameter, other, part in zip(model.parameters(), plain.parameters(), divided, strict=True):
        assert parameter.grad is not None
        assert part is not None
        torch.testing.assert_close(parameter.grad, other.grad)
        torch.testing.assert_close(part * 4, other.grad)
