"""A rank's tokens of a packed batch, as tensors on the device that computes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.gdn_cp import Plan
from pcomm.integration.data.packing import Batch

__all__ = ["DeviceBatch"]


class DeviceBatch(NamedTuple):
    """Inputs of `LanguageModel.token_losses`: the tokens of this context-parallel rank."""

    tokens: Tensor
    """`[T]`, int64."""

    targets: Tensor
    """`[T]`, int64: the token after each."""

    plan: Plan
    """The plan of the sequences of all context-parallel ranks."""

    @classmethod
    def of(cls, batch: Batch, plan: Plan, device: torch.device) -> DeviceBatch:
        """The tokens of `batch` that `plan` gives this rank, on `device`."""
        tokens, targets = (
            plan.shard(torch.from_numpy(array)).to(device, non_blocking=True)
            for array in (batch.tokens, batch.targets)
        )
        return cls(tokens, targets, plan)
