"""Every strategy against one process that has the whole batch, however parameters are used."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_support.trainings import (
    MAX_NORM,
    MICRO_BATCHES,
    STAGES,
    STEPS,
    STRATEGIES,
    Block,
    SmallModel,
    check_state,
    model_of,
    open_two,
    roles_of,
    shard,
    tokens,
    train_one_process,
    train_sharded,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import ConfigError
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy, ReshardPolicy, Roles

# -- every strategy against one process that has the whole batch, and against torch FSDP2 -------

# In fp64, where the order of sums leaves 1e-12 and every mistake leaves more.

# What is between two others, the long form does, too.
every_stage = pytest.mark.parametrize(
    "strategy",
    [pytest.param(one, marks=[pytest.mark.soak] * (one == "zero2")) for one in STAGES],
)


def torch_fsdp2(rank: int, size: int, **options: object) -> dict[str, Tensor]:
    """Parameters after the same steps with torch's own sharding."""
    model = model_of(**options)
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            model.loss(tokens(step, micro, rank)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def check(
    rank: int, size: int, reshard: ReshardPolicy, *, with_fsdp2: bool = True, **options: object
) -> str:
    """Compare, and return the schedule's fingerprint."""
    comm = options.pop("comm", CommPolicy())
    expected, model = model_of(**options), model_of(**options)
    expected_losses, expected_norms = train_one_process(expected, range(size))
    with open_two(size) as groups:
        sharded = shard(model, groups, reshard=reshard, comm=comm)
        losses, norms = train_sharded(model, sharded, rank)
        total = torch.tensor(losses, dtype=torch.float64)
        total = groups["dp", "gather"].collectives.all_reduce(total)
        torch.testing.assert_close((total / size).tolist(), expected_losses, rtol=1e-11, atol=0)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-10, atol=0)
        state = sharded.full_state_dict()
        assert sharded.schedule is not None
        fingerprint = sharded.schedule.fingerprint
    assert list(state) == list(expected.state_dict())
    check_state(state, expected)
    if with_fsdp2:
        for name, value in torch_fsdp2(rank, size, **options).items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)
    return fingerprint


# Each strategy once, and where it is sharded over how many ranks matters, which is how parameters
# are cut and gathered, each number of ranks.
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_two_ranks(rank: int, strategy: str) -> None:
    check(rank, 2, STRATEGIES[strategy], with_fsdp2=False)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@ranks(3)
def test_three_ranks(rank: int, strategy: str) -> None:
    check(rank, 3, STRATEGIES[strategy], with_fsdp2=strategy == "zero3")


@ranks(4)
def test_four_ranks(rank: int) -> None:
    check(rank, 4, STRATEGIES["zero3"], with_fsdp2=False)


@pytest.mark.parametrize("recompute", ["blocks", "reentrant", "inside", "all blocks at once"])
@ranks(2)
def test_recompute(rank: int, recompute: str) -> None:
    found = check(rank, 2, ReshardPolicy.zero3(), with_fsdp2=False, recompute=recompute)
    if recompute in ("blocks", "inside"):
        # Computing again does not change the schedule.
        assert found == check(rank, 2, ReshardPolicy.zero3(), with_fsdp2=False)


@ranks(3)
def test_tied(rank: int) -> None:
    check(rank, 3, STRATEGIES["zero3"], is_tied=True)


@ranks(2)
def test_tied_and_kept(rank: int) -> None:
    check(rank, 2, STRATEGIES["zero1"], is_tied=True, with_fsdp2=False)


@pytest.mark.parametrize(
    "comm",
    [
        CommPolicy(prefetch=0),
        CommPolicy(prefetch=3, inflight_reduce=1),
        CommPolicy(prefetch=4, prefetch_bytes=1),
        CommPolicy(prefetch_backward=0),
        CommPolicy(prefetch=0, prefetch_backward=2),
        CommPolicy(separate="never"),
    ],
    ids=str,
)
@ranks(2)
def test_policies(rank: int, comm: CommPolicy) -> None:
    check(rank, 2, ReshardPolicy.zero3(), with_fsdp2=False, comm=comm)


@ranks(3)
def test_rows_that_are_cut(rank: int) -> None:
    """Without padding three ranks cut them; and none of them waits for the others to agree."""
    comm = CommPolicy(max_padding=0.0, checks_first_step=False)
    check(rank, 3, ReshardPolicy.zero3(), with_fsdp2=False, comm=comm)


# -- parameters that are frozen, unused on one rank, or used twice in a forward -----------------


@ranks(3)
def test_frozen_parameters_are_gathered_and_never_reduced(rank: int) -> None:
    def freeze(model: SmallModel) -> SmallModel:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "up" not in name and "embedding" not in name
        return model

    reference = freeze(model_of())
    train_one_process(reference, [0, 1, 2])
    with open_two(3) as groups:
        reduce = groups["dp", "reduce"]
        spy = reduce.collectives = SpyCollectives(reduce.collectives)
        model = freeze(model_of())
        sharded = fully_shard(model, Roles(groups["dp", "gather"], reduce), units=[Block])
        train_sharded(model, sharded, rank)
        check_state(sharded.full_state_dict(), reference)
        frozen = [plan for plan in sharded.plans if not plan.is_trainable]
        assert {name for plan in frozen for name in plan.names} == {
            name for name, p in reference.named_parameters() if not p.requires_grad
        }
        trained_bytes = sum(plan.reduce_bytes for plan in sharded.plans if plan.is_trainable)
        assert spy.sent_bytes == STEPS * MICRO_BATCHES * trained_bytes


class Frozen(SmallModel):
    """What trains in a step: all, the first block and a norm not, or those alone."""

    def set(self, step: int) -> None:
        for name, parameter in self.named_parameters():
            is_part = name.startswith("blocks.0") or "norm" in name
            parameter.requires_grad_(step % 3 == 0 or is_part is (step % 3 == 2))


@every_stage
@ranks(2)
def test_what_is_frozen_for_some_steps(rank: int, strategy: str) -> None:
    """As a discriminator is; AdamW would decay what has a gradient of zero in place of none."""
    torch.manual_seed(0)
    reference, model = Frozen(num_blocks=3).double(), Frozen(num_blocks=3).double()
    model.load_state_dict(reference.state_dict())
    with open_two() as groups:
        sharded = shard(model, groups, reshard=STRATEGIES[strategy])
        ours, theirs = (
            torch.optim.AdamW(m.parameters(), lr=0.03, weight_decay=0.5) for m in (model, reference)
        )
        for step in range(7):
            for one in (model, reference):
                one.set(step)
            for micro in range(MICRO_BATCHES):
                if step == 6:
                    # Between micro-batches, too: gradients of the first stay.
                    for one in (model, reference):
                        one.set(micro)
                with sharded.accumulate(is_last=micro == MICRO_BATCHES - 1):
                    model.loss(tokens(step, micro, rank)).backward()
                for r in (0, 1):
                    (reference.loss(tokens(step, micro, r)) / 2).backward()
            found = sharded.full_gradients()
            for name, parameter in reference.named_parameters():
                assert (name in found) is (parameter.grad is not None), (step, name)
                if parameter.grad is not None:
                    torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        check_state(sharded.full_state_dict(), reference)


@ranks(2)
def test_what_was_frozen_when_it_was_sharded_stays_so(rank: int) -> None:
    model = model_of()
    model.blocks[0].requires_grad_(False)
    with open_two() as groups:
        shard(model, groups)
        model.loss(tokens(0, 0, rank)).backward()
        model.requires_grad_(True)
        with pytest.raises(ConfigError, match="was False when it was sharded"):
            model.loss(tokens(0, 0, rank))


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
    with open_two() as groups:
        model = Sometimes(uses=rank == 0).double()
        roles = roles_of(groups)
        comm = CommPolicy(prefetch=prefetch)
        sharded = fully_shard(model, roles, units=[Block], comm=comm, divisor=1)
        for step in range(2):
            for one in (sharded, *plain):
                one.zero_grad()
            model.loss(tokens(step, 0, rank)).backward()
            for r in (0, 1):
                plain[r].loss(tokens(step, 0, r)).backward()
            for name, gradient in sharded.full_gradients().items():
                each = [plain[r].get_parameter(name).grad for r in (0, 1)]
                expected = sum(one for one in each if one is not None)
                torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14, msg=name)


@ranks(2)
def test_a_parameter_that_no_rank_uses_decays_with_its_unit(rank: int) -> None:
    plain, model = Sometimes(uses=False).double(), Sometimes(uses=False).double()
    with open_two() as groups:
        sharded = shard(model, groups)
        for one, parameters in ((plain, plain.parameters()), (model, sharded.parameters())):
            optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)
            one.loss(tokens(0, 0, rank)).backward()
            optimizer.step()
        whole = sharded.full_state_dict()["blocks.1.extra"]
    # None without shards, and zeros with them: from-fsdp2.md says so.
    assert torch.equal(plain.blocks[1].extra, torch.ones_like(whole))
    torch.testing.assert_close(whole, torch.full_like(whole, 1 - 0.1 * 0.5))


class Again(SmallModel):
    """Every block computes twice."""

    def _blocks(self, x_BTD: Tensor) -> Tensor:
        return super()._blocks(super()._blocks(x_BTD))


@every_stage
@ranks(2)
def test_units_that_are_used_twice(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    reference = Again(num_blocks=3).double()
    model = copy.deepcopy(reference)
    train_one_process(reference, [0, 1])
    with open_two() as groups:
        sharded = shard(model, groups, reshard=STRATEGIES[strategy])
        train_sharded(model, sharded, rank)
        check_state(sharded.full_state_dict(), reference)


# -- a forward may begin in another method of the model than `forward` --------------------------


@ranks(2)
def test_another_entry_point_and_shapes(rank: int) -> None:
    reference = model_of()
    torch.stack([reference.loss(tokens(0, 0, r)) for r in (0, 1)]).sum().backward()
    with open_two() as groups:
        model = model_of()
        sharded = shard(model, groups, entry_points=["loss"], divisor=1)
        model.loss(tokens(0, 0, rank)).backward()
        for name, gradient in sharded.full_gradients().items():
            expected = reference.get_parameter(name)
            assert sharded.shapes[name] == expected.shape
            torch.testing.assert_close(gradient, expected.grad, rtol=1e-10, atol=1e-14)
