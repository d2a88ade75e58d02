"""The model that all parts train: a stack of two-layer blocks, cut over the ranks of a replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.sync.grad_groups import tensor_groups

WIDTH = 256
"""Size of a row."""

LAYERS = 4
"""Number of blocks."""

ROWS = 64
"""Rows of the global batch."""

LAYERS_ROLE = "layers"
"""Role of tensor-parallel groups: communicators of their own, apart from sums of gradients."""


def stack_units(width: int = WIDTH) -> dict[str, Units]:
    """Units of the split parameters of `StackModel`: its inner columns."""
    inner = Units.columns(4 * width)
    return {"*.up.weight": inner, "*.down.weight": inner}


def tensor_specs(plan: NtpPlan) -> list[GroupSpec]:
    """The tensor-parallel groups of a plan with one stage."""
    found = tensor_groups(plan, 0)
    return [GroupSpec.of_ranks(one.ranks, f"tensor{n}", LAYERS_ROLE) for n, one in enumerate(found)]


class StackModel(nn.Module):
    """Blocks of a widening and a narrowing layer, each with the columns that the plan gives a rank.

    Args:
        plan: Plan of the job, with `stack_units(width)`.
        collectives: Collectives of this rank's tensor-parallel group.
        rank: Global rank of this process.
        width: Size of a row.
        layers: Number of blocks.
    """

    def __init__(
        self,
        plan: NtpPlan,
        collectives: Collectives,
        rank: int,
        *,
        width: int = WIDTH,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        replica = plan.place(rank).replica
        wide: Layout = plan.layout("*.up.weight", replica)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up": ColumnParallelLinear(width, wide, collectives),
                    "down": RowParallelLinear(wide, width, collectives),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the same shape."""
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = block["down"](F.gelu(block["up"](x)))
        return x


def rows_of_replica(shares: Sequence[int], replica: int) -> slice:
    """The rows of the global batch that a replica computes, by the shares of all."""
    first = sum(shares[:replica])
    return slice(first, first + shares[replica])
