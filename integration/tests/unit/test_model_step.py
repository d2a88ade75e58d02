"""Steps over many requests against the forward pass of training, which sees each sequence whole."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pcomm.integration.config import Config, ModelConfig
from pcomm.integration.config_rules import validate
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences
from pcomm.integration.testing.step_pools import StepPools

VOCABULARY = 61
SHAPES = {
    "A": {"pattern": "A", "kv_heads": 4},
    "A with everything": {
        "pattern": "A",
        "qk_norm": True,
        "qkv_bias": True,
        "attention_gate": True,
        "rotary_fraction": 0.5,
    },
    "M": {"pattern": "M", "mlp_width": "none"},
    "M with limits": {
        "pattern": "M",
        "mamba_conv_bias": False,
        "mamba_min_time_step": 0.01,
        "mamba_max_time_step": 0.3,
    },
    "G": {"pattern": "G"},
    "GGGA": {"pattern": "GGGA", "tie_embeddings": True},
    "experts": {
        "pattern": "A",
        "experts": 6,
        "shared_expert_width": 16,
        "shared_expert_gate": True,
    },
}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """Weights so large that each token decides those that follow, decays so slow that it lasts."""
    shape = {"layers": len(SHAPES[name]["pattern"]), **SHAPES[name]}
    config = ModelConfig(
        width=48, heads=4, head_dim=16, mamba_groups=2, mamba_state_dim=24,
        **{"kv_heads": 2, "mlp_width": 64, **shape},
    )  # fmt: skip
    model = LanguageModel(validate(Config(model=config), 1).model, VOCABULARY)
    generator = torch.Generator().manual_seed(2)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if key.endswith("a_log"):
            parameter.data = -3 + noise
        elif key.endswith("dt_bias"):
            parameter.data = -1.5 + 0.3 * noise
        elif key.endswith("bias"):
            parameter.data = 0.3 * noise
        elif parameter.dim() == 1:
            parameter.data = 1 + 0.1 * noise
        else:
            parameter.data = noise * (0.3 if "embedding" in key else parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(count)]


@torch.inference_mode()
def whole(model: LanguageModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor(tokens), plan_sequences(model, (0, len(tokens))))


# Sizes on both sides of a chunk of the recurrent cores (64), of a block, and of a convolution.
CUTS = [(1,), (2, 1), (70, 1, 1), (63, 65, 1, 3), (1, 1, 1, 140, 2), (131,)]


@pytest.mark.parametrize("name", SHAPES)
def test_chunks_of_any_size_equal_the_forward_pass_of_training(name: str) -> None:
    model = model_of(name)
    for cuts in CUTS:
        tokens = tokens_of(sum(cuts))
        pools, found = StepPools(model, 1, len(tokens)), []
        offsets = [sum(cuts[:n]) for n in range(len(cuts) + 1)]
        for start, stop in pairwise(offsets):
            found.append(pools.step({0: tokens[start:stop]})[0])
        expected = whole(model, tokens)
        assert (torch.cat(found) - expected).abs().max() <= 1e-11 * expected.abs().max(), cuts
