"""How queries and keys become what attention compares: the norm of heads, and their rotation."""

# Shape suffixes: T tokens, H heads, K width of a head, R pairs of a rotation.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.inference.layers.norm import Norm

__all__ = ["HeadTurn"]


@dataclass(frozen=True)
class HeadTurn:
    """The norm of queries and keys, and the rotation of both by the positions of their tokens.

    Element r and element r + R of a head are a pair; what is behind the first 2 R elements stays.

    Args:
        cosines_TR: Cosines of the angle of each token and pair, of the dtype of the heads.
        sines_TR: Sines of the same angles.
        query_norm: Norm of each query before it is turned; None for none.
        key_norm: Norm of each key; None exactly where that of queries is.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """

    cosines_TR: Tensor
    sines_TR: Tensor
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def __post_init__(self) -> None:
        """Refuse norms that cannot be.

        Raises:
            ConfigError: One of the two norms alone.
        """
        if (self.query_norm is None) != (self.key_norm is None):
            raise ConfigError(
                "HeadTurn: query_norm and key_norm",
                found="one of them alone",
                why="Kernels and torch norm queries and keys, or neither.",
                fix="Give both norms, or neither.",
            )

    def of_tokens(self, part: slice) -> HeadTurn:
        """That of some of the tokens. Local."""
        return replace(self, cosines_TR=self.cosines_TR[part], sines_TR=self.sines_TR[part])

    def of(self, q_THK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, turned, by operations of torch. Local.

        Args:
            q_THK: Queries as a projection gives them.
            k_TGK: Keys.
        """
        if self.query_norm is not None and self.key_norm is not None:
            q_THK, k_TGK = self.query_norm.of(q_THK), self.key_norm.of(k_TGK)
        return self._turned(q_THK), self._turned(k_TGK)

    def _turned(self, x_THK: Tensor) -> Tensor:
        num_pairs = self.cosines_TR.shape[1]
        cos_T1R, sin_T1R = self.cosines_TR.unsqueeze(1), self.sines_TR.unsqueeze(1)
        first, second, rest = x_THK.split(
            [num_pairs, num_pairs, x_THK.shape[2] - 2 * num_pairs], dim=2
        )
        return torch.cat(
            [
                torch.addcmul(first * cos_T1R, second, sin_T1R, value=-1),
                torch.addcmul(second * cos_T1R, first, sin_T1R),
                rest,
            ],
            dim=2,
        )
