"""Values that an optimizer or a state dict has written are gathered before the next use."""

from __future__ import annotations

import pytest
import torch

from fsdp_support.trainings import (
    MICRO_BATCHES,
    STAGES,
    STRATEGIES,
    Block,
    model_of,
    open_two,
    shard,
    step_of,
    tokens,
)
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles


@pytest.mark.parametrize("strategy", STAGES)
@ranks(2)
def test_evaluation_between_steps_sees_new_parameters(rank: int, strategy: str) -> None:
    reference = model_of()
    with open_two() as groups:
        model = model_of()
        sharded = shard(model, groups, reshard=STRATEGIES[strategy])
        ours = torch.optim.SGD(sharded.parameters(), lr=0.5)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
        for step in range(3):
            for _ in range(2):
                with torch.no_grad():
                    found, expected = (m.loss(tokens(step, 9, 0)) for m in (model, reference))
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            ours.zero_grad()
            theirs.zero_grad()
            step_of(model, sharded, step, rank)
            for micro in range(MICRO_BATCHES):
                losses = [reference.loss(tokens(step, micro, r)) for r in (0, 1)]
                torch.stack(losses).mean().backward()
            ours.step()
            theirs.step()
        other = model_of()
        torch.nn.init.ones_(other.head.weight)
        sharded.load_full_state_dict(other.state_dict())
        with torch.no_grad():
            found, expected = (m.loss(tokens(0, 9, 0)) for m in (model, other))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("strategy", STAGES)
@ranks(2)
def test_loaded_parameters_are_gathered_again(rank: int, strategy: str) -> None:
    """Also what would stay gathered for the next micro-batch."""
    reference = model_of()
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        model = model_of()
        roles = Roles(groups["dp"], groups["dp"])
        sharded = fully_shard(model, roles, units=[Block], reshard=STRATEGIES[strategy])
        with sharded.accumulate(is_last=False):
            for number in range(2):
                model.loss(tokens(number, 0, rank)).backward()
                state = {name: 2 * value for name, value in reference.state_dict().items()}
                sharded.load_full_state_dict(state)
                reference.load_state_dict(state)
                with torch.no_grad():
                    found, expected = (m.loss(tokens(9, 0, 0)) for m in (model, reference))
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
