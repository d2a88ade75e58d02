"""Models with experts against transformers' Mixtral and Qwen3-MoE, with copied weights, in fp64."""

# Shape suffixes: T tokens, D width.

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from pcomm.core import IdentityCollectives
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.models import moe as moe_module
from pcomm.integration.models.layers import LayerBuilder
from pcomm.integration.models.moe import Balance, MixtureOfExperts

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

VOCABULARY = 61
TOKENS = 24
# Mixtral takes its softmax in fp32 whatever the weights are.
ROUTER_ROUNDING = 1e-5
SHAPE = ModelConfig(
    layers=3,
    width=32,
    heads=4,
    kv_heads=2,
    mlp_width=48,
    expert_width=24,
    experts=5,
    experts_per_token=2,
    qk_norm=True,
    moe_every=1,
)


def resolved(**changes: object) -> ModelConfig:
    return validate(Config(model=dataclasses.replace(SHAPE, **changes)), 1).model


def rescale(module: nn.Module) -> None:
    """So large that each part matters: matrices by the root of their inputs, norms off 1."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = parameter.dim() == 1
        std = 0.1 if is_norm else 0.5 if "embedding" in name else parameter.shape[-1] ** -0.5
        parameter.data = noise * std + is_norm


def mixtral(block: MixtureOfExperts, config: ModelConfig) -> nn.Module:
    modeling = transformers.models.mixtral.modeling_mixtral
    theirs = modeling.MixtralSparseMoeBlock(
        transformers.MixtralConfig(
            hidden_size=config.width,
            intermediate_size=config.expert_width,
            num_local_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            experts_implementation="eager",
        )
    ).double()
    theirs.load_state_dict(
        {
            "gate.weight": block.router.weight,
            "experts.gate_up_proj": block.experts.gate_up,
            "experts.down_proj": block.experts.down,
        }
    )
    return theirs


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x_TD, upstream_TD = torch.randn(2, TOKENS, 32, generator=generator, dtype=torch.float64)
    return x_TD.requires_grad_(), upstream_TD


def their_balance(block: MixtureOfExperts, x_TD: Tensor, config: ModelConfig) -> Tensor:
    """Mixtral's own load-balancing loss: it adds up K shares of one, where ours is their mean."""
    modeling = transformers.models.mixtral.modeling_mixtral
    logits = x_TD @ block.router.weight.T
    loss: Tensor = modeling.load_balancing_loss_func(
        (logits,), config.experts, config.experts_per_token
    )
    return loss / config.experts_per_token


def compare_block() -> None:
    config = resolved()
    ours = MixtureOfExperts(LayerBuilder(config, IdentityCollectives(), dtype=torch.float64))
    rescale(ours)
    theirs = mixtral(ours, config)
    x_TD, upstream_TD = example()
    # One row of tokens, all of the batch.
    row_T = torch.zeros(TOKENS, dtype=torch.int64)
    balance = Balance(row_T, 1, TOKENS, 1, 0.7, IdentityCollectives())
    y_TD = ours(x_TD, balance)
    mine = torch.autograd.grad(
        y_TD, [x_TD, ours.router.weight, ours.experts.gate_up, ours.experts.down], upstream_TD
    )
    output = theirs(x_TD.unsqueeze(0))
    their_TD = (output[0] if isinstance(output, tuple) else output).view(TOKENS, -1)
    their_loss = their_balance(ours, x_TD, config)
    total = (their_TD * upstream_TD).sum()
    expected = torch.autograd.grad(
        total,
        [x_TD, theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj],
        retain_graph=True,
    )
    from_loss = torch.autograd.grad(their_loss, [x_TD, ours.router.weight])
    torch.testing.assert_close(y_TD, their_TD, rtol=0, atol=ROUTER_ROUNDING)
    torch.testing.assert_close(
        balance.total(), their_loss.detach().double(), rtol=0, atol=ROUTER_ROUNDING
    )
    pushed = [0.7 * from_loss[0], 0.7 * from_loss[1], 0.0, 0.0]
    for gradient, reference, push in zip(mine, expected, pushed, strict=True):
        torch.testing.assert_close(gradient, reference + push, rtol=0, atol=ROUTER_ROUNDING)


def test_a_block_and_its_balance_loss_equal_mixtral():
    compare_block()


def test_the_oracle_notices_another_weight(monkeypatch):
    route = moe_module.Router.forward

    def swap(self: moe_module.Router, x_TD: Tensor) -> object:
        routing = route(self, x_TD)
        return routing._replace(weights_TK=routing.weights_TK.flip(1))

    monkeypatch.setattr(moe_module.Router, "forward", swap)
    with pytest.raises(AssertionError, match="not close"):
        compare_block()
