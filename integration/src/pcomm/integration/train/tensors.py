"""A rank's tokens of a packed batch, as tensors on the device that computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.gdn_cp import Plan
from pcomm.integration.data.packing import Batch

__all__ = ["BatchTensors"]


@dataclass(frozen=True)
class BatchTensors:
    """Inputs of `LanguageModel.token_losses`; T tokens of this context-parallel rank.

    Args:
        tokens: `[T]` int64.
        targets: `[T]` int64.
        plan: Which tokens belong together, and who has them.
    """

    tokens: Tensor
    targets: Tensor
    plan: Plan

    @classmethod
    def of(cls, batch: Batch, plan: Plan, device: torch.device) -> BatchTensors:
        """What `plan` gives this rank of `batch`, on `device`."""
        tokens, targets = (
            plan.shard(torch.from_numpy(array)).to(device, non_blocking=True)
            for array in (batch.tokens, batch.targets)
        )
        return cls(tokens, targets, plan)
