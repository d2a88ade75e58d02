"""What a segment of a sequence does to a state: S becomes M S + B, with M a matrix or a number."""

# H heads, K key dim, V value dim

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pcomm.gdn_cp.ops.precision import full_precision

__all__ = ["MatrixTransition", "ScalarTransition", "Summary"]

# M and B of each segment and head.
Summary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class MatrixTransition:
    """M is a matrix for each head, `[..., K, K]`: Gated DeltaNet and its relatives."""

    def shape(self, key_dim: int) -> tuple[int, int]:
        """Rows and columns of M for one head."""
        return (key_dim, key_dim)

    def apply(self, summary: Summary, state: Tensor) -> Tensor:
        """The state after a segment, `[..., K, V]`, also under autocast in full precision."""
        matrix, written = summary
        with full_precision(written):
            return matrix @ state + written


@dataclass(frozen=True)
class ScalarTransition:
    """M is one number for each head, `[..., 1, 1]`: Mamba-2 and other states that only decay."""

    def shape(self, key_dim: int) -> tuple[int, int]:
        """Rows and columns of M for one head."""
        return (1, 1)

    def apply(self, summary: Summary, state: Tensor) -> Tensor:
        """The state after a segment, `[..., K, V]`."""
        decay, written = summary
        return decay * state + written
