"""What a model may bring along: replicas, experts, number formats, frozen parts, a meta device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from pcomm.core.collectives.spy import SpyCollectives
from pcomm.core.errors import ConfigError
from pcomm.core.groups.groups import open_groups
from pcomm.core.testing.close import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.runtime.flat_group import FlatGroup
from pcomm.fsdp.runtime.local_group import LocalGroup
from pcomm.fsdp.settings.policy import CommPolicy, Precision
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
from pcomm.fsdp.settings.roles import Roles, Scope
from pcomm.fsdp.sharded import Sharded
from pcomm.fsdp.testing.small_models import Block, SmallModel

STRATEGIES = {
    "zero3": ReshardPolicy.zero3(),
    "zero3, reduced once": ReshardPolicy.zero3(reduce="step"),
    "zero2": ReshardPolicy.zero2(),
    "zero1": ReshardPolicy.zero1(),
}
STEPS, MICRO = 3, 2


def model_of(dtype: torch.dtype = torch.float64) -> SmallModel:
    torch.manual_seed(0)
    return SmallModel().to(dtype)


def tokens(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(7, (2, 6), generator=generator)


def train(model: SmallModel, batches: list[int]) -> None:
    """One process that has the batches of all ranks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.03)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            losses = [model.loss(tokens(step, micro, rank)) for rank in batches]
            torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(parameters, 0.3)
        optimizer.step()


def step_of(model: nn.Module, sharded: Sharded, step: int, rank: int) -> None:
    for micro in range(MICRO):
        with sharded.accumulate(is_last=micro == MICRO - 1):
            model.loss(tokens(step, micro, rank)).backward()


def check_state(state: dict[str, Tensor], expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 4)], ids=str)
@ranks(4)
def test_replicas_of_shards(rank: int, sizes: tuple[int, int], strategy: str) -> None:
    """HSDP; with one shard it is plain data parallelism, with one replica plain sharding."""
    reference = model_of()
    train(reference, [0, 1, 2, 3])
    topology = Topology({"rep": sizes[1], "shard": sizes[0]}, order=("shard", "rep"))
    names = ["shard", ("shard", "reduce"), "rep"]
    with open_groups(topology, names) as groups:
        model = model_of()
        roles = Roles(groups["shard"], groups["shard", "reduce"], groups["rep"])
        sharded = fully_shard(model, roles, units=[Block], shard=STRATEGIES[strategy])
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.03)
        for step in range(STEPS):
            sharded.zero_grad()
            step_of(model, sharded, step, rank)
            sharded.clip_grad_norm(0.3)
            optimizer.step()
        check_state(sharded.full_state_dict(), reference)


@ranks(2)
def test_every_backward_may_be_a_last_one(rank: int) -> None:
    """Two steps' gradients without zero_grad add up, with replicas too."""
    reference = model_of()
    for step in range(2):
        for micro in range(MICRO):
            (sum(reference.loss(tokens(step, micro, r)) for r in (0, 1)) / 2).backward()
    for sizes in ((2, 1), (1, 2)):
        topology = Topology({"rep": sizes[1], "shard": sizes[0]}, order=("shard", "rep"))
        with open_groups(topology, ["shard", "rep"]) as groups:
            model = model_of()
            roles = Roles(groups["shard"], groups["shard"], groups["rep"])
            sharded = fully_shard(model, roles, units=[Block])
            for step in range(2):
                step_of(model, sharded, step, rank)
            expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
            torch.testing.assert_close(sharded.grad_norm(), expected, rtol=1e-12, atol=0)


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
            Roles(groups["dp", "gather"], groups["dp", "reduce"]),
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


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(2)
def test_mixed_precision_equals_fsdp2(rank: int, reduce_dtype: torch.dtype) -> None:
    theirs = model_of(torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in theirs.blocks:
        fsdp2(block, mesh=mesh, mp_policy=mixed)
    fsdp2(theirs, mesh=mesh, mp_policy=mixed)
    ours = model_of(torch.float32)
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        sharded = fully_shard(
            ours,
            Roles(groups["dp", "gather"], groups["dp", "reduce"]),
            units=[Block],
            precision=Precision(torch.bfloat16, reduce_dtype),
        )
        ours_optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for step in range(3):
            mine, other = ours.loss(tokens(step, 0, rank)), theirs.loss(tokens(step, 0, rank))
            assert mine.dtype == torch.bfloat16
            assert_equal(mine.detach(), other.detach())
            mine.backward()
            other.backward()
            for optimizer in (ours_optimizer, their_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        state = sharded.full_state_dict()
        assert all(p.dtype == torch.float32 for p in sharded.parameters())
    for name, value in theirs.named_parameters():
        # Half of a sum is exact, and a sum of two has one order.
        assert_equal(state[name], value.full_tensor())


@ranks(3)
def test_frozen_parameters_are_gathered_and_never_reduced(rank: int) -> None:
    def freeze(model: SmallModel) -> SmallModel:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "up" not in name and "embedding" not in name
        return model

    reference = freeze(model_of())
    train(reference, [0, 1, 2])
    with open_groups(Topology({"dp": 3}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        reduce = groups["dp", "reduce"]
        spy = reduce.collectives = SpyCollectives(reduce.collectives)
        model = freeze(model_of())
        sharded = fully_shard(model, Roles(groups["dp", "gather"], reduce), units=[Block])
        trained = [p for p in sharded.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.03)
        for step in range(STEPS):
            sharded.zero_grad()
            step_of(model, sharded, step, rank)
            sharded.clip_grad_norm(0.3)
            optimizer.step()
        check_state(sharded.full_state_dict(), reference)
        frozen = [plan for plan in sharded.plans if not plan.is_trainable]
        assert {name for plan in frozen for name in plan.names} == {
            name for name, p in reference.named_parameters() if not p.requires_grad
        }
        trained_bytes = sum(plan.reduce_bytes for plan in sharded.plans if plan.is_trainable)
        assert spy.sent_bytes == STEPS * MICRO * trained_bytes


@ranks(2)
def test_a_model_on_the_meta_device(rank: int) -> None:
    with torch.device("meta"):
        model, tied = SmallModel(), SmallModel(is_tied=True)
    expected = SmallModel()
    torch.manual_seed(3)
    for module in expected.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
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


def _initialise(module: nn.Module) -> None:
    if isinstance(module, SmallModel):
        module.scale.fill_(0.7)
    else:
        module.reset_parameters()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@ranks(2)
def test_bytes_are_those_of_the_formula(rank: int, strategy: str, prefetch: int) -> None:
    """(N - 1) / N P b for each gather and each reduce."""
    shard = STRATEGIES[strategy]
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        gather, reduce = groups["dp", "gather"], groups["dp", "reduce"]
        gathers = gather.collectives = SpyCollectives(gather.collectives)
        reduces = reduce.collectives = SpyCollectives(reduce.collectives)
        model = model_of(torch.float32)
        precision = Precision(torch.bfloat16, torch.float32)
        sharded = fully_shard(
            model,
            Roles(gather, reduce),
            units=[Block],
            shard=shard,
            comm=CommPolicy(prefetch=prefetch),
            precision=precision,
        )
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        step_of(model, sharded, 0, rank)
        optimizer.step()
        gathers.clear()
        reduces.clear()
        step_of(model, sharded, 1, rank)
    root, *blocks = sharded.plans
    elements = {plan.name: plan.layout.length for plan in sharded.plans}
    total, block = sum(elements.values()), elements["blocks.0"]
    assert len(blocks) == 4
    if shard.keep == "use":
        # Forward and backward of each micro-batch; the root stays, and so do the last units of
        # forward, which backward needs first.
        gathered = MICRO * (2 * total - elements[root.name] - (1 + prefetch) * block)
    else:
        gathered = total
    reduced = total * (MICRO if shard.reduce == "micro_batch" else 1)
    assert gathers.sent_bytes == gathered * 2 // 2, strategy
    assert reduces.sent_bytes == reduced * 4 // 2, strategy
    assert set(gathers.counts) == {"all_gather"}
    assert set(reduces.counts) == {"reduce_scatter"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_evaluation_between_steps_sees_new_parameters(rank: int, strategy: str) -> None:
    reference = model_of()
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        model = model_of()
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
        sharded = fully_shard(model, roles, units=[Block], shard=STRATEGIES[strategy])
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
            for micro in range(MICRO):
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


def in_use(group: FlatGroup | LocalGroup) -> list[Tensor]:
    """Gradient buffers that are written or on their way."""
    assert isinstance(group, FlatGroup)
    sent = group._reducing[1] if group._reducing is not None else None
    return [one for one in (group._gradient, sent) if one is not None]


@pytest.mark.parametrize(("prefetch", "backward"), [(0, None), (1, None), (2, None), (2, 0)])
@ranks(2)
def test_memory_is_given_back(rank: int, prefetch: int, backward: int | None) -> None:
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        model = SmallModel(num_blocks=7).double()
        comm = CommPolicy(prefetch=prefetch, inflight_reduce=2, prefetch_backward=backward)
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
        sharded = fully_shard(model, roles, units=[Block], comm=comm)
        root, block = (plan.gathered_bytes for plan in sharded.plans[:2])
        gathered, gradients, in_backward = [], [], []

        def look(*_: object) -> None:
            memory = sharded.memory()
            gathered.append(memory["gathered"])
            gradients.append(memory["gradients"])
            taken = [one for group in sharded._groups for one in in_use(group)]
            assert len({one.data_ptr() for one in taken}) == len(taken), "a buffer is used twice"

        def look_in_backward(*_: object) -> None:
            look()
            in_backward.append(gathered[-1])

        for one in model.blocks:
            one.down.register_forward_hook(look)
            one.norm.register_full_backward_hook(look_in_backward)
        for _ in range(2):
            in_backward.clear()
            assert sharded.memory()["gathered"] == sharded.memory()["gradients"] == 0
            model.loss(tokens(0, 0, rank)).backward()
            sharded.zero_grad()
        assert max(gathered) == root + (1 + prefetch) * block
        # The last ones of forward are still there; those after them come as backward says.
        depth = prefetch if backward is None else backward
        assert max(in_backward[1 + prefetch :]) == root + (1 + depth) * block
        # One that is filled, two on their way, and the root's, which fills up all along.
        assert max(gradients) <= root + 3 * block
        shares = sum(plan.layout.share * plan.main_dtype.itemsize for plan in sharded.plans)
        assert sharded.memory() == {
            "shards": shares,
            "gathered": 0,
            "gradients": 0,
            "shard gradients": 0,
        }


@ranks(2)
def test_another_entry_point_and_shapes(rank: int) -> None:
    reference = model_of()
    torch.stack([reference.loss(tokens(0, 0, r)) for r in (0, 1)]).sum().backward()
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        model = model_of()
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
        sharded = fully_shard(model, roles, units=[Block], entry_points=["loss"], divisor=1)
        model.loss(tokens(0, 0, rank)).backward()
        for name, gradient in sharded.full_gradients().items():
            expected = reference.get_parameter(name)
            assert sharded.shapes[name] == expected.shape
            torch.testing.assert_close(gradient, expected.grad, rtol=1e-10, atol=1e-14)


class Sometimes(SmallModel):
    """Its second block has a parameter that only some ranks use, as experts without tokens."""

    def __init__(self, uses: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        block = self.blocks[1]
        block.extra = nn.Parameter(torch.ones(5))
        if uses:
            block.register_forward_hook(lambda module, _, y: y * module.extra)


@pytest.mark.parametrize("prefetch", [0, 2])
@ranks(2)
def test_a_parameter_that_one_rank_does_not_use(rank: int, prefetch: int) -> None:
    plain = [Sometimes(uses=r == 0).double() for r in (0, 1)]
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        model = Sometimes(uses=rank == 0).double()
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
        comm = CommPolicy(prefetch=prefetch)
        sharded = fully_shard(model, roles, units=[Block], comm=comm, divisor=1)
        for step in range(2):
            sharded.zero_grad()
            model.loss(tokens(step, 0, rank)).backward()
            for r in (0, 1):
                plain[r].zero_grad()
                plain[r].loss(tokens(step, 0, r)).backward()
            for name, gradient in sharded.full_gradients().items():
                each = [plain[r].get_parameter(name).grad for r in (0, 1)]
                expected = sum(one for one in each if one is not None)
                torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14, msg=name)


class Again(SmallModel):
    """Every block computes twice."""

    def _blocks(self, x_BTD: Tensor) -> Tensor:
        return super()._blocks(super()._blocks(x_BTD))


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_units_that_are_used_twice(rank: int, strategy: str) -> None:
    def build() -> SmallModel:
        torch.manual_seed(0)
        return Again(num_blocks=3).double()

    reference = build()
    train(reference, [0, 1])
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        model = build()
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
        sharded = fully_shard(model, roles, units=[Block], shard=STRATEGIES[strategy])
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.03)
        for step in range(STEPS):
            sharded.zero_grad()
            step_of(model, sharded, step, rank)
            sharded.clip_grad_norm(0.3)
            optimizer.step()
        check_state(sharded.full_state_dict(), reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_loaded_parameters_are_gathered_again(rank: int, strategy: str) -> None:
    """Also what would stay gathered for the next micro-batch."""
    reference = model_of()
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        model = model_of()
        roles = Roles(groups["dp"], groups["dp"])
        sharded = fully_shard(model, roles, units=[Block], shard=STRATEGIES[strategy])
        with sharded.accumulate(is_last=False):
            for number in range(2):
                model.loss(tokens(number, 0, rank)).backward()
                state = {name: 2 * value for name, value in reference.state_dict().items()}
                sharded.load_full_state_dict(state)
                reference.load_state_dict(state)
                with torch.no_grad():
                    found, expected = (m.loss(tokens(9, 0, 0)) for m in (model, reference))
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("limit", ["less", "as much", "none"])
@ranks(2)
def test_a_budget_of_bytes_is_kept_by_a_real_step(rank: int, limit: str) -> None:
    """Both sides of what two units need, in bytes of what is gathered."""
    reference = model_of()
    (sum(reference.loss(tokens(0, 0, r)) for r in (0, 1)) / 2).backward()
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        block = fully_shard(model_of(), roles, units=[Block]).plans[1].gathered_bytes
        budget = {"less": 2 * block - 1, "as much": 2 * block, "none": None}[limit]
        model = model_of()
        comm = CommPolicy(prefetch=3, prefetch_bytes=budget)
        sharded = fully_shard(model, roles, units=[Block], comm=comm)
        root = sharded.plans[0].gathered_bytes
        model.loss(tokens(0, 0, rank)).backward()
        sharded.zero_grad()
        seen: list[int] = []
        model.blocks[0].norm.register_forward_hook(
            lambda *_: seen.append((sharded.memory()["gathered"] - root) // block)
        )
        model.loss(tokens(0, 0, rank)).backward()
        # In forward and in backward: the one in use, and one, two or three ahead.
        assert seen[0] == {"less": 2, "as much": 3, "none": 4}[limit]
        for name, gradient in sharded.full_gradients().items():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14, msg=name)
