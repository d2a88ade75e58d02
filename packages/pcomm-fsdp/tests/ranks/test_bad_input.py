"""Mistakes on one rank are errors on all, and none of them hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from pcomm.core.errors import ConfigError, DivergenceError, PcommError, PeerError, TopologyError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy, Roles, Scope
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


@ranks(2)
def test_a_parameter_in_two_units(rank: int) -> None:
    model = SmallModel()
    if rank == 1:
        model.blocks[2].up.weight = model.blocks[0].up.weight
    expected = ConfigError if rank == 1 else PeerError
    with open_two() as groups, pytest.raises(expected, match=r"it is also 'blocks.2.up.weight'"):
        shard(model, groups)


@ranks(2)
def test_a_parameter_on_another_device(rank: int) -> None:
    model = SmallModel()
    model.head.to("meta")
    with open_two() as groups, pytest.raises(PcommError, match=r"'head\.weight' on meta"):
        shard(model if rank else SmallModel(), groups)


@ranks(2)
def test_groups_of_other_ranks(rank: int) -> None:
    topology = Topology({"dp": 1, "tp": 2})
    with open_groups(topology, ["dp", "tp"]) as groups:
        roles = Roles(groups["tp"], groups["dp"])
        with pytest.raises(TopologyError, match=rf"ranks \[0, 1\] and \[{rank}\]"):
            fully_shard(SmallModel(), roles, units=[Block])


@ranks(2)
def test_replicas_within_the_gather_group(rank: int) -> None:
    with open_two() as groups:
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"], groups["dp", "gather"])
        with pytest.raises(TopologyError, match="this rank alone is in both"):
            fully_shard(SmallModel(), roles, units=[Block])


@ranks(2)
def test_an_optimizer_made_before(rank: int) -> None:
    model = SmallModel()
    # Its class derives from Adam, and only that from Optimizer.
    optimizer = torch.optim.AdamW(model.parameters()) if rank == 0 else None
    with open_two() as groups, pytest.raises(PcommError, match="an optimizer of type AdamW"):
        shard(model, groups)
    del optimizer


@ranks(2)
def test_a_model_that_is_sharded_already(rank: int) -> None:
    model = SmallModel()
    with open_two() as groups:
        shard(model, groups)
        with pytest.raises(ConfigError, match=r"embedding.weight.*a shard of shape"):
            shard(model, groups)


@ranks(2)
def test_other_models_on_ranks(rank: int) -> None:
    with open_two() as groups, pytest.raises(DivergenceError, match=r"rank 0 has .* rank 1 has"):
        shard(SmallModel(num_blocks=3 + rank), groups)


@ranks(2)
def test_names_that_are_not_there(rank: int) -> None:
    with open_two() as groups:
        with pytest.raises(ConfigError, match="unit Conv1d"):
            fully_shard(SmallModel(), roles_of(groups), units=[nn.Conv1d])
        scope = Scope(lambda name, _: "expert" in name, roles_of(groups))
        with pytest.raises(ConfigError, match="scopes expert"):
            shard(SmallModel(), groups, scopes={"expert": scope})
        with pytest.raises(ConfigError, match="divisor -1"):
            shard(SmallModel(), groups, divisor=-1)
        with pytest.raises(ConfigError, match="entry point 'generate'"):
            shard(SmallModel(), groups, entry_points=["generate"])


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
def test_another_order_in_the_first_step(rank: int) -> None:
    model = Faulty()
    model.order = (0, 1, 2, 3) if rank else (0, 2, 1, 3)
    with open_two() as groups:
        sharded = shard(model, groups)
        with pytest.raises(DivergenceError, match=r"use blocks.2 forward.*use blocks.1 forward"):
            step_on_tokens(model, sharded)


@pytest.mark.parametrize("checks", [True, False])
@ranks(2)
def test_a_rank_throws_in_the_first_forward(rank: int, checks: bool) -> None:
    model = Faulty()
    if rank == 1:
        model.fault = throw
    with open_two() as groups:
        sharded = shard(model, groups, comm=CommPolicy(checks_first_step=checks))
        expected = ArithmeticError if rank == 1 else PeerError
        with pytest.raises(expected, match="a bad batch"):
            step_on_tokens(model, sharded)


# -- later -----------------------------------------------------------------------------------


@ranks(2)
def test_a_rank_throws_in_a_later_forward(rank: int) -> None:
    model = Faulty()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        if rank == 1:
            model.fault = throw
        with pytest.raises(ArithmeticError if rank == 1 else PeerError, match="a bad batch"):
            step_on_tokens(model, sharded)
        model.fault = None
        # Collectives are left over that only one rank joined: an error on both, and no hang.
        with pytest.raises(PcommError, match="step after an error"):
            step_on_tokens(model, sharded)


@ranks(2)
def test_all_ranks_throw_and_go_on(rank: int) -> None:
    torch.manual_seed(0)
    model = Faulty()
    with open_two() as groups:
        sharded = shard(model, groups)
        losses = [step_on_tokens(model, sharded)]
        for _ in range(2):
            model.fault = throw
            with pytest.raises(ArithmeticError):
                step_on_tokens(model, sharded)
            assert all(p.numel() == q.numel() for p, q in zip_parameters(model, sharded))
            model.fault = None
            losses.append(step_on_tokens(model, sharded))
        assert len(set(losses)) == 1


@ranks(2)
def test_all_ranks_throw_in_the_first_forward_and_go_on(rank: int) -> None:
    model = Faulty()
    with open_two() as groups:
        sharded = shard(model, groups)
        model.fault = throw
        with pytest.raises(ArithmeticError):
            step_on_tokens(model, sharded)
        model.fault = None
        assert step_on_tokens(model, sharded) == step_on_tokens(model, sharded)


@ranks(2)
def test_all_ranks_throw_in_backward_and_go_on(rank: int) -> None:
    model = Faulty()

    def refuse(_: Tensor) -> None:
        raise ArithmeticError("a bad gradient")

    with open_two() as groups:
        sharded = shard(model, groups)
        first = step_on_tokens(model, sharded)
        handle = model.blocks[1].register_forward_hook(
            lambda *a: a[2].register_hook(refuse) and None
        )
        with pytest.raises(ArithmeticError):
            step_on_tokens(model, sharded)
        handle.remove()
        assert step_on_tokens(model, sharded) == first


@ranks(2)
def test_a_rank_uses_units_in_another_order(rank: int) -> None:
    model = Faulty()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        if rank == 1:
            model.order = (0, 2, 1, 3)
        found = "rank 1 has use blocks.2 forward, where use blocks.1 forward was foreseen"
        with pytest.raises(DivergenceError, match=found):
            step_on_tokens(model, sharded)


@ranks(2)
def test_a_rank_goes_only_half_of_the_way_back(rank: int) -> None:
    model = Faulty()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        if rank == 1:
            model.blocks[1].register_forward_hook(lambda _module, _inputs, y: y.detach())
        found = "rank 1 has done .* backward, where use blocks.1 backward was foreseen"
        with pytest.raises(DivergenceError, match=found):
            step_on_tokens(model, sharded)
        with pytest.raises(PcommError, match="step after an error"):
            step_on_tokens(model, sharded)


@ranks(2)
def test_a_rank_leaves_backward_out(rank: int) -> None:
    model = SmallModel()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        if rank == 1:
            model.loss(TOKENS)
        found = r"rank 1 has end \(root\) forward, where use \(root\) backward was foreseen"
        with pytest.raises(DivergenceError, match=found):
            step_on_tokens(model, sharded)
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
        with pytest.raises(ConfigError, match="its forward, which is still running"):
            _backward_inside(model)


def _backward_inside(model: SmallModel) -> None:
    def backward(_module: nn.Module, _inputs: object, y: Tensor) -> None:
        y.sum().backward()

    handle = model.blocks[3].register_forward_hook(backward)
    try:
        model.loss(TOKENS)
    finally:
        handle.remove()


@ranks(2)
def test_a_unit_called_by_itself(rank: int) -> None:
    model = SmallModel()
    with open_two() as groups:
        shard(model, groups)
        with pytest.raises(ConfigError, match=r"unit 'blocks.0' called by itself"):
            model.blocks[0](torch.zeros(1, 1, 5))


def zip_parameters(model: nn.Module, sharded: Sharded) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(model.parameters(), sharded.parameters(), strict=True)
