"""Experts in a scope of their own have the gradients and the norm of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import Block, SmallModel, roles_of, tokens
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles, Scope


class Experts(nn.Module):
    """One expert a rank: its weight differs from that of the other expert-parallel rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class WithExperts(SmallModel):
    """Each block is followed by this rank's expert."""

    def __init__(self, expert: int) -> None:
        torch.manual_seed(0)
        super().__init__(num_blocks=2)
        for number, block in enumerate(self.blocks):
            block.expert = Experts(10 * number + expert)
            block.register_forward_hook(lambda module, _, y: module.expert(y))


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4)], ids=str)
@ranks(4)
def test_experts_have_groups_and_a_divisor(rank: int, sizes: tuple[int, int]) -> None:
    """(edp, ep): with ep ranks the expert's own group is smaller, down to one rank."""
    edp, ep = sizes
    topology = Topology({"dp": 4}).view("expert", {"edp": edp, "ep": ep})
    dense, expert = [("dp", "gather"), ("dp", "reduce")], ["expert.edp", "expert.ep"]
    names = [*dense, *expert, ("expert.edp", "reduce")]
    with open_groups(topology, names) as groups:
        mine = groups["expert.ep"].rank
        # One process: the loss of a batch is that of the model with the expert of its rank.
        models = [WithExperts(e).double() for e in range(ep)]
        expert_of = [r % ep for r in range(4)]
        assert mine == expert_of[rank]
        for r in range(4):
            (models[expert_of[r]].loss(tokens(0, 0, r)) / 4).backward()
        model = WithExperts(mine).double()
        sharded = fully_shard(
            model,
            roles_of(groups),
            units=[Block],
            scopes={
                "expert": Scope(
                    lambda name, _: ".expert." in name,
                    Roles(groups["expert.edp"], groups["expert.edp", "reduce"]),
                    spread=groups["expert.ep"],
                )
            },
        )
        model.loss(tokens(0, 0, rank)).backward()
        norm = sharded.grad_norm()
        squares = torch.zeros((), dtype=torch.float64)
        for name, _ in models[0].named_parameters():
            each = [m.get_parameter(name).grad for m in models]
            of_name = each if "expert" in name else [sum(each)]  # type: ignore[arg-type]
            squares += sum(one.square().sum() for one in of_name)  # type: ignore[union-attr]
        torch.testing.assert_close(norm, squares.sqrt(), rtol=1e-12, atol=0)
        for name, grad in sharded.full_gradients().items():
            if "expert" in name:
                expected = models[mine].get_parameter(name).grad
            else:
                expected = sum(m.get_parameter(name).grad for m in models)  # type: ignore[misc]
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-14, msg=name)
