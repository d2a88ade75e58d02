"""On one rank nothing is hooked, copied or replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_support.trainings import Block, model_of
from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.testing.assertions import assert_equal
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision, Roles, Scope

ALONE = Roles(Group("dp", (0,), None, role="gather"), Group("dp", (0,), None, role="reduce"))
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])


def test_parameters_stay_as_they_are() -> None:
    model = model_of(torch.float32)
    before = dict(model.named_parameters())
    sharded = fully_shard(model, ALONE, units=[Block])
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert dict(sharded.named_parameters()).keys() == before.keys()
    assert all(p is before[name] for name, p in sharded.named_parameters())
    assert "forward" not in vars(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_divisor_applies_to_each_gradient_once() -> None:
    """EP = DP: the expert has one rank and is divided by all of them, in each micro-batch."""
    model, plain = model_of(torch.float32), model_of(torch.float32)
    scope = Scope(lambda name, _: name.endswith("up.weight"), ALONE, divisor=4)
    fully_shard(model, ALONE, units=[Block], scopes={"expert": scope}, divisor=2)
    for _ in range(3):
        model.loss(TOKENS).backward()
        plain.loss(TOKENS).backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad
        assert found is not None
        assert parameter.grad is not None
        divisor = 4 if name.endswith("up.weight") else 2
        assert_equal(found, parameter.grad / divisor)


def test_other_dtypes_need_buffers_on_one_rank_too() -> None:
    model = model_of(torch.float32)
    sharded = fully_shard(model, ALONE, units=[Block], precision=Precision(torch.bfloat16))
    assert model.loss(TOKENS).dtype == torch.bfloat16
    for _ in range(2):
        sharded.zero_grad()
        model.loss(TOKENS).backward()
    assert all(p.dtype == torch.float32 == p.grad.dtype for p in sharded.parameters())
    expected = model_of(torch.float32)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.copy_(parameter.bfloat16())
    expected.loss(TOKENS).backward()
    norm = nn.utils.get_total_norm([p.grad for p in expected.parameters()])
    torch.testing.assert_close(sharded.grad_norm().float(), norm, rtol=0.05, atol=0)


def test_state_dicts_are_those_of_the_model() -> None:
    for options in ({}, {"is_tied": True}):
        model, source = model_of(torch.float32, **options), model_of(torch.float32, **options)
        for parameter in source.parameters():
            parameter.data.add_(1)
        expected = source.state_dict()
        for precision in (Precision(), Precision(torch.bfloat16)):
            sharded = fully_shard(
                model_of(torch.float32, **options), ALONE, units=[Block], precision=precision
            )
            sharded.load_full_state_dict(expected)
            state = sharded.full_state_dict()
            assert list(state) == list(model.state_dict())
            for name, value in expected.items():
                assert_equal(state[name], value)
    with pytest.raises(ConfigError, match=r"missing \['blocks\.0\.up\.bias'\]"):
        sharded.load_full_state_dict({k: v for k, v in expected.items() if k != "blocks.0.up.bias"})
    with pytest.raises(ConfigError, match=r"unknown \['blocks\.0\.up\.biases'\]"):
        sharded.load_full_state_dict(expected | {"blocks.0.up.biases": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"shape \(1,\)"):
        sharded.load_full_state_dict(expected | {"blocks.0.up.bias": torch.zeros(1)})


def test_the_report_names_groups_and_schedule() -> None:
    model = model_of(torch.float32)
    sharded = fully_shard(model, ALONE, units=[Block], precision=Precision(torch.bfloat16))
    assert "no schedule yet" in str(sharded.report())
    model.loss(TOKENS).backward()
    assert "backward use  blocks.3" in str(sharded.report())
    assert sharded.schedule is not None
    alone = fully_shard(model_of(torch.float32), ALONE, units=[Block])
    assert "left as they are, one rank" in str(alone.report())


def test_a_gradient_that_comes_after_its_reduce() -> None:
    model = model_of(torch.float32)
    fully_shard(model, ALONE, units=[Block], precision=Precision(torch.bfloat16))
    late: list[torch.Tensor] = []
    up = model.blocks[0].up
    up.register_forward_hook(lambda module, _, y: late.append(module.weight) and None)
    model.loss(TOKENS).backward()
    # A graph of its own, which the unit knows nothing of, and which reads no released memory.
    flat = late[0].view(-1)
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight(.|\n)*being reduced already"):
        flat.backward(torch.ones_like(flat, dtype=torch.bfloat16))


def test_the_norm_of_many_gradients_is_that_of_their_sum_in_fp64() -> None:
    """torch's own norm on a CPU is 1e-4 too small here, and less so on more ranks."""
    model = nn.Linear(2048, 2048, bias=False)
    sharded = fully_shard(model, ALONE, units=[nn.Linear])
    gradient = 1e-3 * torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    model.weight.grad = gradient.clone()
    exact = float(gradient.double().norm())
    # Pieces in fp32, which round by 1e-7.
    assert float(sharded.grad_norm()) == pytest.approx(exact, rel=1e-6)
