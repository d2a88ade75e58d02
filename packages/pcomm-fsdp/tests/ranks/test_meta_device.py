"""A model on the meta device is initialised module by module, tied parameters once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_support.trainings import Block, SmallModel, open_two, roles_of, tokens
from pcomm.core.errors import ConfigError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles


def _initialise(module: nn.Module) -> None:
    if isinstance(module, SmallModel):
        module.scale.fill_(0.7)
    else:
        module.reset_parameters()


@ranks(2)
def test_a_model_on_the_meta_device(rank: int) -> None:
    with torch.device("meta"):
        model, tied = SmallModel(), SmallModel(is_tied=True)
    expected = SmallModel()
    torch.manual_seed(3)
    for module in expected.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with open_two() as groups:
        roles = roles_of(groups)
        with pytest.raises(ConfigError, match=r"embedding\.weight' on meta"):
            fully_shard(model, roles, units=[Block])
        torch.manual_seed(3)
        sharded = fully_shard(
            model, roles, units=[Block], device=torch.device("cpu"), initialise=_initialise
        )
        state = sharded.full_state_dict()
        for name, value in expected.named_parameters():
            assert_equal(state[name], value.detach())
        model.loss(tokens(0, 0, rank)).backward()
        torch.manual_seed(3)
        sharded = fully_shard(tied, roles, units=[Block], device="cpu", initialise=_initialise)
        expected = SmallModel(is_tied=True)
        torch.manual_seed(3)
        for module in expected.modules():
            if module is expected or hasattr(module, "reset_parameters"):
                _initialise(module)
        # Each module draws anew into the same memory, and the last one stays.
        state = sharded.full_state_dict()
        for name, value in expected.state_dict().items():
            assert_equal(state[name], value)
        assert tied.head.weight is tied.embedding.weight
        tied.loss(tokens(0, 0, rank)).backward()


@ranks(2)
def test_tied_parameters_are_one_while_they_are_initialised(rank: int) -> None:
    """A module may use what another one has drawn, and add to it."""
    with torch.device("meta"):
        tied = SmallModel(is_tied=True)

    def add(module: nn.Module) -> None:
        if module is tied.head:
            module.weight.data.add_(3.0)
        elif module is tied:
            tied.scale.fill_(0.7)
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data.fill_(2.0)

    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        cpu = torch.device("cpu")
        sharded = fully_shard(tied, roles, units=[Block], device=cpu, initialise=add)
        state = sharded.full_state_dict()
        assert_equal(state["head.weight"], torch.full((7, 5), 5.0))
        assert_equal(state["embedding.weight"], state["head.weight"])
