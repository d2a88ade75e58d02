"""Scopes and replicas: each with groups of its own, and the gradients of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import (
    MICRO_BATCHES,
    STAGES,
    STRATEGIES,
    Block,
    SmallModel,
    check_state,
    model_of,
    replicated,
    roles_of,
    step_of,
    tokens,
    train_one_process,
    train_sharded,
)
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy, Roles, Scope

# -- hSDP: shards that several ranks hold have the gradients of one process ---------------------


# Every stage once, and the ends of ZeRO with shards and replicas; the long form has all.
KEPT = [
    *(((2, 2), "zero3"), ((2, 2), "zero1")),
    *(((4, 1), "zero2"), ((1, 4), "zero3, reduced once")),
]


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        *KEPT,
        *(
            pytest.param((2, 2), one, marks=pytest.mark.soak)
            for one in STAGES
            if ((2, 2), one) not in KEPT
        ),
    ],
    ids=str,
)
@ranks(4)
def test_replicas_of_shards(rank: int, sizes: tuple[int, int], strategy: str) -> None:
    """HSDP; with one shard it is plain data parallelism, with one replica plain sharding."""
    reference = model_of()
    train_one_process(reference, [0, 1, 2, 3])
    with replicated(*sizes) as roles:
        model = model_of()
        sharded = fully_shard(model, roles, units=[Block], reshard=STRATEGIES[strategy])
        train_sharded(model, sharded, rank)
        check_state(sharded.full_state_dict(), reference)


@ranks(2)
def test_every_backward_may_be_a_last_one(rank: int) -> None:
    """Two steps' gradients without zero_grad add up, with replicas too."""
    reference = model_of()
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            (sum(reference.loss(tokens(step, micro, r)) for r in (0, 1)) / 2).backward()
    for sizes in ((2, 1), (1, 2)):
        with replicated(*sizes) as roles:
            model = model_of()
            sharded = fully_shard(model, roles, units=[Block])
            for step in range(2):
                step_of(model, sharded, step, rank)
            expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
            torch.testing.assert_close(sharded.grad_norm(), expected, rtol=1e-12, atol=0)


# -- experts in a scope of their own have the gradients and the norm of one process -------------


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
        # Torch's own adds up over all the groups of an expert.
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(nn.utils.get_total_norm(gradients), norm, rtol=1e-12, atol=0)
        for name, grad in sharded.full_gradients().items():
            if "expert" in name:
                expected = models[mine].get_parameter(name).grad
            else:
                expected = sum(m.get_parameter(name).grad for m in models)  # type: ignore[misc]
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-14, msg=name)


# -- scopes that share communicators ------------------------------------------------------------

# At sizes that go between pairs of ranks. Reduces of one scope are under way while the other's are
# issued, so a message that is taken for one of the other scope is a wrong gradient and no error.

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


@pytest.mark.parametrize(
    ("separate", "dim"),
    [
        ("always", 64),
        ("never", 64),
        ("always", 1024),
        pytest.param("never", 1024, marks=pytest.mark.soak),
    ],
)
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
