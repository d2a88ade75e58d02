"""The norm of all gradients, each counted once: the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.tensor_parallel.norms import sum_of_squares
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.sync.grad_groups import all_tensor_groups
from pcomm.ntp.sync.synced_params import SyncedParam

__all__ = ["NormSlots", "canonical_norm"]


class NormSlots:
    """A number for each rank of one replica, in which only that rank adds anything.

    Sums of one number and zeros are exact, so every rank adds up the same numbers in the same
    order, whatever the order in which a backend reduces.

    Args:
        plan: Plan of the job.
        rank: Global rank of this process.

    Attributes:
        count: Number of numbers.
        own: Index of the number of this rank; None if another replica counts.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        counted: list[int] = []
        for stage, groups in enumerate(all_tensor_groups(plan)):
            chosen = plan.canonical_replica(stage)
            counted += next(group.ranks for group in groups if group.replica == chosen)
        self.count = len(counted)
        self.own = counted.index(rank) if rank in counted else None
        self.is_first = plan.place(rank).index == 0


def canonical_norm(
    gradients: Sequence[tuple[SyncedParam, Tensor]],
    slots: NormSlots,
    collectives: Collectives,
    device: torch.device,
) -> Tensor:
    """The 2-norm in fp64, without a dimension. Collective: one all-reduce over all used ranks.

    Args:
        gradients: Parameters of this rank, each with its summed gradient.
        slots: Numbers of the job.
        collectives: Collectives of all used ranks.
        device: Device of the result.
    """
    squares = torch.zeros(slots.count, dtype=torch.float64, device=device)
    if slots.own is not None:
        counted = [
            # Torch adds up the squares of complex numbers one after another, in their precision.
            torch.view_as_real(gradient) if gradient.is_complex() else gradient
            for param, gradient in gradients
            if param.units is not None or slots.is_first
        ]
        wide = [gradient for gradient in counted if gradient.element_size() > 2]
        squares[slots.own] = sum_of_squares(wide, device)
        for gradient in counted:
            # Torch would round the norm of a gradient of 16 bits to its type. One copy at a time.
            if gradient.element_size() <= 2:
                squares[slots.own] += sum_of_squares([gradient.float()], device)
    return collectives.all_reduce(squares, out=squares).sum().sqrt()
