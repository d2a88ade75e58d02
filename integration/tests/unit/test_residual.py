"""`train.residual`: the type of the stream between blocks, and what norms make of two types."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integration_support.short_runs import tiny_config
from pcomm.core.testing import assert_close
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, TrainConfig
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.layers import RMSNorm
from pcomm.integration.parallelize import plan_sequences
from pcomm.integration.precision import autocast

VOCABULARY, CPU = 320, torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {
    "A": {"qk_norm": True},
    "GMA": {"pattern": "GMA", "layers": 3},
    "experts": {"experts": 4, "expert_width": 32},
}


def losses(
    name: str, dtype: str, *, narrow: bool, wide: torch.dtype = torch.float32
) -> tuple[Tensor, list[torch.dtype]]:
    """Nats of 48 tokens in two sequences, and the dtypes between blocks."""
    config = validate(tiny_config(model=SHAPES[name]), 1).model
    model = LanguageModel(config, VOCABULARY, dtype=torch.float32, narrow_residual=narrow)
    initialise(model, config, seed=0)
    model.to(wide)
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, given, out: seen.extend((given[0].dtype, out.dtype)))
    tokens = torch.randint(VOCABULARY, (48,), generator=torch.Generator().manual_seed(1))
    with autocast(dtype, CPU):
        nats = model.token_losses(tokens, tokens.roll(-1), plan_sequences(model, (0, 20, 48)))
    nats.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == wide
        assert parameter.grad.isfinite().all()
    return nats.detach(), seen


@pytest.mark.parametrize("name", SHAPES)
def test_a_narrow_stream_has_the_type_of_the_computation(name: str) -> None:
    exact, _ = losses(name, "fp32", narrow=False, wide=torch.float64)
    for narrow, expected in ((False, torch.float32), (True, torch.bfloat16)):
        nats, seen = losses(name, "bf16", narrow=narrow)
        assert set(seen) == {expected}
        # Numbers of 8 bits: a few operations a block, on logits that are small at first.
        blocks = len(seen) // 2
        assert_close(nats.bfloat16(), exact, num_terms=8 * blocks, magnitude=1.0)


@pytest.mark.parametrize("name", SHAPES)
def test_in_fp32_there_is_nothing_to_narrow(name: str) -> None:
    nats, seen = losses(name, "fp32", narrow=True)
    expected, _ = losses(name, "fp32", narrow=False)
    assert torch.equal(nats, expected)
    assert set(seen) == {torch.float32}


def test_it_is_wide_by_default() -> None:
    assert TrainConfig().residual == "fp32"
    assert validate(Config(), 1).train.residual == "fp32"


def test_a_norm_of_two_types_rounds_its_weight() -> None:
    # Torch warns where it has no kernel for the two.
    norm = RMSNorm(16, 1e-5)
    nn.init.normal_(norm.weight)
    x = torch.randn(8, 16).bfloat16().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = norm(x)
    y.sum().backward()
    wide = x.detach().double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    assert y.dtype == torch.bfloat16
    # The weight is rounded, and the result.
    assert_close(
        y.detach(), exact.detach(), num_terms=2, magnitude=float(exact.detach().abs().max())
    )
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32
