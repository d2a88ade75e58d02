"""First weights that depend on the seed and the parameter's name, and on nothing else."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from pcomm.core.placement import placements_of, take_shard
from pcomm.integration.config import ModelConfig

__all__ = ["initialise"]

# Layers that write into the residual stream; their variance is shared among all of them.
_RESIDUAL = ("mixer.output.weight", "mlp.down.weight")


def initialise(model: nn.Module, config: ModelConfig, *, seed: int, tp_rank: int = 0) -> None:
    """Fill every parameter of `model` with this rank's part of the logical weight. Local.

    A logical weight is drawn whole, by a generator of its own, and then cut; so the same seed
    gives the same model on 1, 2 or 4 ranks, and adding a layer changes no other. Matrices are
    normal with `config.init_std`, those that write into the residual stream less by the square
    root of twice the number of layers (Radford et al., 2019), norms are 1.
    """
    placements = placements_of(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            nn.init.ones_(parameter)
            continue
        placement = placements[name]
        std = config.init_std
        if name.endswith(_RESIDUAL):
            std /= math.sqrt(2 * config.layers)
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        whole = torch.empty(placement.logical_shape(parameter.shape))
        whole.normal_(0.0, std, generator=generator)
        share = whole
        if placement.layout is not None:
            share = take_shard(whole, placement.layout, tp_rank, dim=placement.dim)
        with torch.no_grad():
            parameter.copy_(share)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
