"""A language model of a few hundred parameters whose sizes divide by nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["Block", "SmallModel"]

# B batch, T tokens, D model dim, V vocabulary

Recompute = Literal["no", "blocks", "reentrant", "inside", "all blocks at once"]


class Block(nn.Module):
    """A norm and two layers, with a width of its own kind for each parameter."""

    def __init__(self, dim: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim + 1)
        self.down = nn.Linear(3 * dim + 1, dim, bias=False)
        self.recompute = recompute

    def forward(self, x_BTD: Tensor) -> Tensor:
        """`x + mlp(norm(x))`."""
        if self.recompute:
            y_BTD: Tensor = checkpoint(self._mlp, x_BTD, use_reentrant=False)
            return x_BTD + y_BTD
        return x_BTD + self._mlp(x_BTD)

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down(F.gelu(self.up(self.norm(x_BTD))))
        return y_BTD


class SmallModel(nn.Module):
    """Embedding, blocks, norm and head.

    Args:
        dim: Model dim.
        num_blocks: Number of blocks.
        vocabulary: Number of tokens.
        is_tied: True if the head's weight is the embedding's.
        recompute: Part of the model that is computed again in backward.
    """

    def __init__(
        self,
        *,
        dim: int = 5,
        num_blocks: int = 4,
        vocabulary: int = 7,
        is_tied: bool = False,
        recompute: Recompute = "no",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            Block(dim, recompute=recompute == "inside") for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=not is_tied)
        self.register_buffer("scale", torch.tensor(0.7))
        if is_tied:
            self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits `[B, T, V]`."""
        x_BTD = self.embedding(tokens_BT)
        if self.recompute == "all blocks at once":
            x_BTD = checkpoint(self._blocks, x_BTD, use_reentrant=False)
        else:
            x_BTD = self._blocks(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD)) * self.scale
        return logits_BTV

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Mean cross-entropy of each token given those before it."""
        logits_BTV = self(tokens_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    def _blocks(self, x_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute in ("blocks", "reentrant"):
                x_BTD = checkpoint(block, x_BTD, use_reentrant=self.recompute == "reentrant")
            else:
                x_BTD = block(x_BTD)
        return x_BTD
