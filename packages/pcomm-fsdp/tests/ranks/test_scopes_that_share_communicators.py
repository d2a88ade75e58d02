"""Scopes over the same ranks have the same communicators, at sizes that go between pairs of ranks.

Reduces of one scope are under way while the other's are issued, so a message that is taken for one
of the other scope is a wrong gradient without an error.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy, Roles, Scope

# D model dim


class DenseAndExpert(nn.Module):
    """A block of which half the parameters are in the second scope."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim, bias=False)
        self.expert = nn.Linear(dim, dim, bias=False)

    def forward(self, x_D: Tensor) -> Tensor:
        return x_D + self.expert(torch.tanh(self.dense(x_D)))


def gradients(model: nn.Module, batches: list[Tensor]) -> None:
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()


@pytest.mark.parametrize("dim", [64, 1024], ids=["small", "real"])
@pytest.mark.parametrize("separate", ["always", "never"])
@ranks(2)
def test_gradients_of_both_scopes_are_those_of_one_process(
    rank: int, separate: str, dim: int
) -> None:
    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(DenseAndExpert(dim) for _ in range(3)))

    batches = [torch.randn(4, dim, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    expected = model_of()
    gradients(expected, batches)

    topology = Topology({"dp": 2})
    experts = topology.view("expert", {"edp": 2, "ep": 1})
    keys = [(name, role) for name in ("dp", "expert.edp") for role in ("gather", "reduce")]
    with open_groups(experts, keys) as groups:
        roles = [Roles(groups[n, "gather"], groups[n, "reduce"]) for n in ("dp", "expert.edp")]
        assert roles[0].gather.process_group is roles[1].gather.process_group
        model = model_of()
        sharded = fully_shard(
            model,
            roles[0],
            units=[DenseAndExpert],
            scopes={"expert": Scope(lambda name, _: "expert" in name, roles[1])},
            comm=CommPolicy(separate=separate),  # type: ignore[arg-type]
        )
        for _ in range(2):
            for parameter in sharded.parameters():
                parameter.grad = None
            model(batches[rank]).square().mean().backward()
            for name, parameter in sharded.full_gradients().items():
                torch.testing.assert_close(
                    parameter, expected.get_parameter(name).grad, rtol=1e-4, atol=1e-7, msg=name
                )
