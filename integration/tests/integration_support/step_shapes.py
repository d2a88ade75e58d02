"""Small models of every kind of layer, whose tokens decide those that follow."""

from __future__ import annotations

import random

import torch

from pcomm.core.tensor_parallel import param_layouts_of, take_shard
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["SHAPES", "VOCABULARY", "model_of", "shard_of", "tokens_of"]

VOCABULARY = 64
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


def model_of(
    name: str, dtype: torch.dtype = torch.float64, width: int = 48, head_dim: int = 16
) -> LanguageModel:
    """Weights so large that each token decides those that follow, decays so slow that it lasts."""
    shape = {"layers": len(SHAPES[name]["pattern"]), **SHAPES[name]}
    config = ModelConfig(
        width=width, heads=4, head_dim=head_dim, mamba_groups=2, mamba_state_dim=24,
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


def shard_of(whole: LanguageModel, collectives: VirtualCollectives) -> LanguageModel:
    """The part of one of several tensor-parallel ranks; each has all experts."""
    dtype = whole.norm.weight.dtype
    model = LanguageModel(whole.config, VOCABULARY, collectives, dtype=dtype)
    layouts = param_layouts_of(model)
    for name, parameter in model.named_parameters():
        mine, own = whole.get_parameter(name).detach(), layouts[name]
        if own.layout is not None and own.scope == "dense":
            mine = take_shard(mine, own.layout, collectives.rank, dim=own.dim)
        parameter.data = mine.clone()
    return model.eval()


def tokens_of(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(count)]
