"""Parameters that are frozen, unused on one rank, or used twice in a forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import (
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
    step_of,
    tokens,
    train_one_process,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.errors import ConfigError
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy, Roles


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
        assert spy.sent_bytes == STEPS * MICRO_BATCHES * trained_bytes


class Frozen(SmallModel):
    """What trains in a step: all, the first block and a norm not, or those alone."""

    def set(self, step: int) -> None:
        for name, parameter in self.named_parameters():
            is_part = name.startswith("blocks.0") or "norm" in name
            parameter.requires_grad_(step % 3 == 0 or is_part is (step % 3 == 2))


@pytest.mark.parametrize("strategy", STAGES)
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


@pytest.mark.parametrize("strategy", STAGES)
@ranks(2)
def test_units_that_are_used_twice(rank: int, strategy: str) -> None:
    def build() -> SmallModel:
        torch.manual_seed(0)
        return Again(num_blocks=3).double()

    reference = build()
    train_one_process(reference, [0, 1])
    with open_two() as groups:
        model = build()
        sharded = shard(model, groups, reshard=STRATEGIES[strategy])
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.03)
        for step in range(STEPS):
            sharded.zero_grad()
            step_of(model, sharded, step, rank)
            sharded.clip_grad_norm(0.3)
            optimizer.step()
        check_state(sharded.full_state_dict(), reference)
