"""Mistakes on one rank are errors on all, and none of them hangs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import (
    TOKENS,
    Block,
    SmallModel,
    open_two,
    roles_of,
    shard,
    step_on_tokens,
    throw,
)
from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    PcommError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
)
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Roles, Scope
from pcomm.fsdp.sharded import Sharded


class Faulty(SmallModel):
    """A model that does something else when told."""

    fault: Callable[[], None] | None = None
    order: tuple[int, ...] = (0, 1, 2, 3)

    def _blocks(self, x_BTD: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks[i] for i in self.order):
            if number == 2 and self.fault is not None:
                self.fault()
            x_BTD = block(x_BTD)
        return x_BTD


# -- before anything is sent -----------------------------------------------------------------


def in_two_units(rank: int) -> SmallModel:
    model = SmallModel()
    if rank == 1:
        model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def elsewhere(rank: int) -> SmallModel:
    model = SmallModel()
    if rank == 1:
        model.head.to("meta")
    return model


@ranks(2)
def test_what_is_refused_before_anything_is_sent(rank: int) -> None:
    specs = [("dp", "gather"), ("dp", "reduce"), "one"]
    with open_groups(Topology({"dp": 2, "one": 1}), specs) as groups:
        roles = roles_of(groups)
        optimized, sharded = SmallModel(), SmallModel()
        # Its class derives from Adam, and only that from Optimizer.
        optimizer = torch.optim.AdamW(optimized.parameters()) if rank == 0 else None
        shard(sharded, groups)
        expert = Scope(lambda name, _: "expert" in name, roles)
        twice = Roles(roles.gather, roles.reduce, roles.gather)
        of_rank_0, of_rank_1 = (ConfigError if rank == r else PeerError for r in (0, 1))
        for model, options, error, words in (
            (in_two_units(rank), {}, of_rank_1, r"it is also 'blocks.2.up.weight'"),
            (elsewhere(rank), {}, of_rank_1, r"'head\.weight' on meta"),
            (optimized, {}, of_rank_0, "an optimizer of type AdamW"),
            (sharded, {}, ConfigError, r"embedding.weight.*a shard of shape"),
            (SmallModel(num_blocks=3 + rank), {}, DivergenceError, "rank 0 has .* rank 1 has"),
            (SmallModel(), {"units": [nn.Conv1d]}, ConfigError, "unit Conv1d"),
            (SmallModel(), {"scopes": {"expert": expert}}, ConfigError, "scopes expert"),
            (SmallModel(), {"divisor": -1}, ConfigError, "divisor -1"),
            (SmallModel(), {"entry_points": ["generate"]}, ConfigError, "entry point 'generate'"),
            (SmallModel(), {"reshard": "zero3"}, ConfigError, "fully_shard: reshard="),
            (SmallModel(), {"reshard": ReshardPolicy.zero3}, ConfigError, "fully_shard: reshard="),
            (SmallModel(), {"precision": torch.bfloat16}, ConfigError, "fully_shard: precision="),
            (SmallModel(), {"comm": Precision()}, ConfigError, "fully_shard: comm="),
        ):
            with pytest.raises(error, match=words):
                shard(model, groups, **options)  # type: ignore[arg-type]
        for wrong, words in (
            (Roles(roles.gather, groups["one"]), rf"ranks \[0, 1\] and \[{rank}\]"),
            (twice, "this rank alone is in both"),
        ):
            with pytest.raises(TopologyError, match=words):
                fully_shard(SmallModel(), wrong, units=[Block])
        with pytest.raises(ConfigError, match=r"unit 'blocks.0' called by itself"):
            sharded.blocks[0](torch.zeros(1, 1, 5))
        del optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ReshardPolicy, {"keep": "foo"}),
        (ReshardPolicy, {"reduce": "steps"}),
        (CommPolicy, {"prefetch": -1}),
        (CommPolicy, {"prefetch_backward": -1}),
        (CommPolicy, {"inflight_reduce": 0}),
        (CommPolicy, {"prefetch": True}),
        (CommPolicy, {"prefetch": 1.5}),
        (CommPolicy, {"separate": "no"}),
        (CommPolicy, {"prefetch_bytes": -1}),
        (CommPolicy, {"max_padding": math.nan}),
        (CommPolicy, {"max_padding": 1.0}),
        (Precision, {"param_dtype": torch.int32}),
        (Precision, {"reduce_dtype": torch.complex64}),
        (Precision, {"main_dtype": "float32"}),
    ],
)
def test_settings_that_cannot_be(kind: Callable[..., object], options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        kind(**options)


CLIPS: dict[str, Callable[[SmallModel, Sharded], object]] = {
    "clip_grad_norm, which every": lambda _, sharded: sharded.clip_grad_norm(1.0),
    "grad_norm, which every": lambda _, sharded: sharded.grad_norm(),
    "sum_of_squares, which every": lambda _, sharded: sharded.sum_of_squares(),
    "clip_grad_norm_ or get_total_norm, which every": lambda model, _: nn.utils.clip_grad_norm_(
        model.parameters(), 1.0
    ),
}


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("words", CLIPS)
@ranks(2)
def test_one_rank_alone_takes_a_norm(rank: int, words: str, goes_on: bool) -> None:
    """The other one goes on with its step, or is done: the error names what it should call."""
    limit = CommOptions(timeout_s=2.0)
    specs = [GroupSpec("dp", role=role, options=limit) for role in ("gather", "reduce")]
    with open_groups(Topology({"dp": 2}), specs) as groups:
        model = SmallModel()
        sharded = shard(model, groups)
        for _ in range(2):
            step_on_tokens(model, sharded)
        if rank == 1:
            with pytest.raises(PeerError, match=f"fsdp: {words} rank has to call"):
                CLIPS[words](model, sharded)
        elif goes_on:
            with pytest.raises(PeerError):
                step_on_tokens(model, sharded)


@ranks(2)
def test_one_rank_alone_asks_for_the_whole_state(rank: int) -> None:
    """The other one goes on with its step: both learn of it."""
    limit, os.environ["PCOMM_TIMEOUT_S"] = os.environ.get("PCOMM_TIMEOUT_S"), "4"
    try:
        with open_two() as groups:
            model = SmallModel()
            sharded = shard(model, groups)
            for _ in range(2):
                step_on_tokens(model, sharded)
            if rank == 1:
                with pytest.raises(PeerTimeoutError, match="full_state_dict"):
                    sharded.full_state_dict()
            else:
                with pytest.raises(PeerError, match=r"gather of .*full_state_dict"):
                    step_on_tokens(model, sharded)
    finally:
        del os.environ["PCOMM_TIMEOUT_S"]
        if limit is not None:
            os.environ["PCOMM_TIMEOUT_S"] = limit


@ranks(2)
def test_a_limit_of_the_norm_that_cannot_be(rank: int) -> None:
    with open_two() as groups:
        model = SmallModel()
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        for limit in (-1.0, math.nan):
            # Nothing is sent: one rank alone gets the error.
            with pytest.raises(ConfigError, match="a limit that no norm can have"):
                sharded.clip_grad_norm(limit)
        sharded.clip_grad_norm(math.inf)


# -- in the first step -----------------------------------------------------------------------


@pytest.mark.parametrize("checks", [True, False])
@ranks(2)
def test_a_unit_that_is_not_used_is_named(rank: int, checks: bool) -> None:
    """It may be used later, so it is no error; its parameters have no gradients, as without us."""
    model = Faulty()
    with open_two() as groups:
        sharded = shard(model, groups, comm=CommPolicy(checks_first_step=checks))
        assert "not used" not in str(sharded.report())
        model.order = (0, 1, 3)
        step_on_tokens(model, sharded)
        assert "units not used so far: blocks.2" in str(sharded.report())
        assert not any("blocks.2" in name for name in sharded.full_gradients())
        model.order = (0, 1, 2, 3)
        step_on_tokens(model, sharded)
        assert "not used" not in str(sharded.report())
        assert len(sharded.full_gradients()) == len(list(model.parameters()))


@ranks(2)
def test_ranks_differ_in_the_first_step(rank: int) -> None:
    with open_two() as groups:
        model = Faulty()
        model.order = (0, 1, 2, 3) if rank else (0, 2, 1, 3)
        sharded = shard(model, groups)
        with pytest.raises(DivergenceError, match=r"use blocks.2 forward.*use blocks.1 forward"):
            step_on_tokens(model, sharded)
    for checks in (True, False):
        with open_two() as groups:
            model = Faulty()
            model.fault = throw if rank == 1 else None
            sharded = shard(model, groups, comm=CommPolicy(checks_first_step=checks))
            with pytest.raises(ArithmeticError if rank else PeerError, match="a bad batch"):
                step_on_tokens(model, sharded)


# -- later -----------------------------------------------------------------------------------


def throw_in_forward(model: Faulty) -> None:
    model.fault = throw


def use_another_order(model: Faulty) -> None:
    model.order = (0, 2, 1, 3)


def go_half_of_the_way_back(model: Faulty) -> None:
    model.blocks[1].register_forward_hook(lambda _module, _inputs, y: y.detach())


def leave_backward_out(model: Faulty) -> None:
    model.loss(TOKENS)


FAULTS: dict[str, tuple[Callable[[Faulty], None], type[Exception], type[Exception], str]] = {
    "throws": (throw_in_forward, ArithmeticError, PeerError, "a bad batch"),
    "another order": (
        use_another_order,
        DivergenceError,
        DivergenceError,
        "rank 1 has use blocks.2 forward, where use blocks.1 forward was foreseen",
    ),
    "half of the way back": (
        go_half_of_the_way_back,
        DivergenceError,
        DivergenceError,
        "rank 1 has done .* backward, where use blocks.1 backward was foreseen",
    ),
    "no backward": (
        leave_backward_out,
        DivergenceError,
        DivergenceError,
        r"rank 1 has end \(root\) forward, where use \(root\) backward was foreseen",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@ranks(2)
def test_a_rank_does_something_else_in_a_later_step(rank: int, fault: str) -> None:
    do, own, others, words = FAULTS[fault]
    model = Faulty()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        if rank == 1:
            do(model)
        with pytest.raises(own if rank == 1 else others, match=words):
            step_on_tokens(model, sharded)
        model.fault = None
        # Collectives are left over that only one rank joined: an error on both, and no hang.
        with pytest.raises(PcommError, match="step after an error"):
            step_on_tokens(model, sharded)


@ranks(2)
def test_ranks_that_leave_out_other_layers(rank: int) -> None:
    """In a step that no schedule foresaw: at the first layer that differs, on both."""
    for checks in (True, False):
        model = Faulty()
        with open_two() as groups:
            sharded = shard(model, groups, comm=CommPolicy(checks_first_step=checks))
            for _ in range(2):
                step_on_tokens(model, sharded)
            model.order = (0, 2) if rank else (0, 2, 3)
            with pytest.raises(DivergenceError, match=r"rank 1 has (done|use) .*root"):
                step_on_tokens(model, sharded)


@ranks(2)
def test_a_rank_that_never_comes(rank: int) -> None:
    """What the time limit of a group is for."""
    model = SmallModel()
    limited = CommOptions(timeout_s=4)
    specs = [GroupSpec("dp", "gather", limited), GroupSpec("dp", "reduce", limited)]
    with open_groups(Topology({"dp": 2}), specs) as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        if rank == 0:
            with pytest.raises(PeerError, match="gather of"):
                step_on_tokens(model, sharded)


@ranks(2)
def test_backward_that_is_not_that_of_its_forward(rank: int) -> None:
    model = SmallModel()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        loss = model.loss(TOKENS)
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigError, match="a forward that has had its backward"):
            loss.backward()
        step_on_tokens(model, sharded)
        early = model.loss(TOKENS)
        with torch.no_grad():
            for part in sharded.parameters():
                part.mul_(2)
        with pytest.raises(ConfigError, match="written after the forward that it belongs to"):
            early.backward()
        model.blocks[3].register_forward_hook(lambda _module, _inputs, y: y.sum().backward())
        with pytest.raises(ConfigError, match="its forward, which is still running"):
            model.loss(TOKENS)
