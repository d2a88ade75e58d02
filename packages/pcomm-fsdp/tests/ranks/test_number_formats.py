"""Number formats: the bits of torch FSDP2, or of torch with parameters that are rounded so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_support.schedules import plan_of
from fsdp_support.trainings import Block, SmallModel, model_of, open_two, roles_of, tokens
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.groups.group import Group
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision, ReshardPolicy, Roles, Scope

# -- number formats of computation and reduction give the bits of torch FSDP2 -------------------


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
    with open_two() as groups:
        sharded = fully_shard(
            ours,
            roles_of(groups),
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


# -- gradients in fp16, whose sum over ranks may be too large where their mean is not -----------

FP16 = torch.float16
LARGE = 40_000.0


class Product(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 130))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def values(rows: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, 130, generator=generator)
    x[0] = LARGE
    x[1] = LARGE if rank else -LARGE
    x[2] = 2.0**-20
    return x.to(FP16)


def fsdp2_gradient(rows: int, rank: int) -> Tensor:
    model = Product(rows)
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)
    fsdp2(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    model(values(rows, rank)).backward()
    gradient: Tensor = model.weight.grad.full_tensor()  # type: ignore[union-attr]
    return gradient


@pytest.mark.parametrize("reduce", ["micro_batch", "step"])
@ranks(2)
def test_as_fsdp2_divides(rank: int, reduce: str) -> None:
    """Small, and beyond a mebibyte; the mean, and a sum that fp32 has room for."""
    for rows in (3, 5000):
        expected = fsdp2_gradient(rows, rank)
        assert expected[0, 0] == LARGE
        with open_two() as groups:
            roles = roles_of(groups)
            for divisor in (None, 1.0, 6.0):
                model = Product(rows)
                sharded = fully_shard(
                    model,
                    roles,
                    units=[],
                    reshard=ReshardPolicy(reduce=reduce),  # type: ignore[arg-type]
                    precision=Precision(FP16, FP16, torch.float32),
                    divisor=divisor,
                )
                model(values(rows, rank)).backward()
                found = sharded.full_gradients()["weight"]
                if divisor is None:
                    assert torch.equal(found, expected)
                else:
                    torch.testing.assert_close(found, expected * 2 / divisor, rtol=1e-6, atol=0)


# -- a scope with number formats of its own, beside torch with parameters that are rounded so ---

SPECS = [("dp", "gather"), ("dp", "reduce")]
BF16 = Precision(torch.bfloat16, torch.float32, casts_inputs=False)


def is_wide(name: str, _: object = None) -> bool:
    """Embedding and norms; the rest of the model is rounded."""
    return "norm" in name or "embedding" in name


def loss_of(model: nn.Module, rank: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model.loss(tokens(0, 0, rank))


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


# -- by how much fp16 gradients are divided before they are summed ------------------------------


@pytest.mark.parametrize(
    ("size", "factor"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 4), (8, 4), (16, 4), (17, 8), (64, 8)]
)
def test_about_the_root_of_the_number_of_ranks(size: int, factor: int) -> None:
    group = Group("dp", tuple(range(size)), None)
    plan = plan_of("unit", Roles(group, group), reduce_dtype=torch.float16)
    assert plan.predivisor == factor
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert replace(plan, reduce_dtype=dtype).predivisor == 1
