"""A scope with number formats of its own, beside torch with parameters that are rounded so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import Block, SmallModel, open_two
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision, ReshardPolicy, Roles, Scope

SPECS = [("dp", "gather"), ("dp", "reduce")]
BF16 = Precision(torch.bfloat16, torch.float32, casts_inputs=False)


def is_wide(name: str, _: object = None) -> bool:
    """Embedding and norms; the rest of the model is rounded."""
    return "norm" in name or "embedding" in name


def tokens(rank: int) -> Tensor:
    return torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, rank: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model.loss(tokens(rank))


def rounded_gradients(rank: int) -> dict[str, Tensor]:
    """Of one rank's batch, by torch alone: rounding is a step of the graph."""
    torch.manual_seed(0)
    model = SmallModel()
    leaves = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    for module_name, module in model.named_modules():
        for key in list(module._parameters):
            name = f"{module_name}.{key}".lstrip(".")
            del module._parameters[key]
            if name in leaves:
                value = leaves[name] if is_wide(name) else leaves[name].bfloat16()
                setattr(module, key, value)
            else:
                setattr(module, key, None)
    loss_of(model, rank).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("keep", ["use", "step"])
@ranks(2)
def test_a_scope_with_a_precision_of_its_own(rank: int, keep: str) -> None:
    expected = [rounded_gradients(r) for r in (0, 1)]
    torch.manual_seed(0)
    model = SmallModel()
    with open_two() as groups:
        gather, reduce = (groups[key] for key in SPECS)
        roles = Roles(gather, reduce)
        spy = gather.collectives = SpyCollectives(gather.collectives)
        wide = Scope(is_wide, roles, precision=Precision(), reshard=ReshardPolicy(keep=keep))
        sharded = fully_shard(
            model, roles, units=[Block], scopes={"wide": wide}, precision=BF16, divisor=1
        )
        plans = sharded.plans
        for plan in plans:
            assert {is_wide(name) for name in plan.names} == {plan.scope == "wide"}
            assert plan.param_dtype == (torch.float32 if plan.scope else torch.bfloat16)
        loss_of(model, rank).backward()
        for name, gradient in sharded.full_gradients().items():
            assert_equal(gradient, sum(one[name] for one in expected))
        spy.clear()
        loss_of(model, rank).backward()
        # All but the root and the last two of four blocks are gathered again for backward.
        again = ("blocks.0", "blocks.1")
        assert spy.sent_bytes == sum(
            plan.layout.shard_length
            * (4 if plan.scope else 2)
            * (2 if plan.unit in again and plan.reshard.keep == "use" else 1)
            for plan in plans
        )
