"""A packed batch as tensors on the device that computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.integration.data.packing import Batch
from pcomm.integration.models.sequences import PackedSequences

__all__ = ["BatchTensors"]


@dataclass(frozen=True)
class BatchTensors:
    """Inputs of `LanguageModel.token_losses`; T tokens.

    Args:
        tokens: `[T]` int64.
        targets: `[T]` int64.
        positions: `[T]` int64.
        sequences: Which tokens belong together, on the host.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    sequences: PackedSequences

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> BatchTensors:
        """`batch` on `device`."""
        tokens, targets, positions = (
            torch.from_numpy(array).to(device, non_blocking=True)
            for array in (batch.tokens, batch.targets, batch.positions)
        )
        return cls(tokens, targets, positions, PackedSequences(batch.cu_seqlens))
