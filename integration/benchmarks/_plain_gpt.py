"""The quick-start GPT as one would write it with plain PyTorch modules: what ours is timed against.

Separate projections, `nn.RMSNorm`, rotation by two multiplications, attention over a batch of rows.
It knows nothing of documents, groups or layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.integration.config.sections import ResolvedModel
from pcomm.integration.models.language_model import LanguageModel


class PlainGPT(nn.Module):
    """A decoder over rows of equal length. B rows, L tokens a row."""

    def __init__(self, config: ResolvedModel, vocabulary: int, row_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.layers = nn.ModuleList(_PlainLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, vocabulary, bias=False)
        pairs = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(row_length).unsqueeze(-1) * config.rope_theta**-pairs
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        x = self.embedding(tokens_BL)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets_BL.flatten())

    def copy_from(self, ours: LanguageModel) -> None:
        """Take the weights of our model."""
        config = ours.config
        heads = [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)]
        with torch.no_grad():
            self.embedding.weight.copy_(ours.embedding.weight)
            self.head.weight.copy_(ours.head.weight)
            self.norm.weight.copy_(ours.norm.weight)
            for layer, block in zip(self.layers, ours.blocks, strict=True):
                q, k, v = block.mixer.qkv.weight.split(heads)
                gate, up = block.mlp.gate_up.weight.chunk(2)
                for mine, theirs in (
                    (layer.q, q),
                    (layer.k, k),
                    (layer.v, v),
                    (layer.o, block.mixer.output.weight),
                    (layer.gate, gate),
                    (layer.up, up),
                    (layer.down, block.mlp.down.weight),
                    (layer.norm1, block.mixer_norm.weight),
                    (layer.norm2, block.mlp_norm.weight),
                ):
                    mine.weight.copy_(theirs)


class _PlainLayer(nn.Module):
    def __init__(self, config: ResolvedModel) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm1 = nn.RMSNorm(config.width, config.norm_eps)
        self.norm2 = nn.RMSNorm(config.width, config.norm_eps)
        self.q = nn.Linear(config.width, wide, bias=False)
        self.k = nn.Linear(config.width, narrow, bias=False)
        self.v = nn.Linear(config.width, narrow, bias=False)
        self.o = nn.Linear(wide, config.width, bias=False)
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (count, self.head_dim)).transpose(1, 2)
            for project, count in (
                (self.q, self.heads),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        q, k = (z * cos + _half_turn(z) * sin for z in (q, k))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _half_turn(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)
