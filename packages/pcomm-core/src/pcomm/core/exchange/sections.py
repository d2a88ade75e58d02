"""Several tensors, each with layouts of its own, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pcomm.core.errors import LayoutError
from pcomm.core.exchange.packing import Packing
from pcomm.core.exchange.ways import Way, choose_way, run_way

if TYPE_CHECKING:
    from pcomm.core.collectives.protocol import Collectives
    from pcomm.core.exchange.exchange import Exchange

__all__ = ["SectionExchange"]


@dataclass(frozen=True)
class SectionExchange:
    """Exchanges that one collective carries out together; made by `Exchange.sections`.

    Args:
        exchanges: The exchange of each section, over the same ranks.

    Raises:
        LayoutError: No exchange, or exchanges over different numbers of ranks.
    """

    exchanges: tuple[Exchange, ...]

    def __post_init__(self) -> None:
        sizes = [one.size for one in self.exchanges]
        if len(set(sizes)) != 1:
            raise LayoutError(
                "Exchange.sections",
                found=f"exchanges over {sizes} ranks",
                why="All sections travel in one message between the same ranks.",
                fix="Give at least one exchange, all with the same number of ranks.",
            )

    def apply(
        self,
        tensors: Sequence[Tensor],
        collectives: Collectives,
        *,
        packing: Packing | None = None,
        fused: int = 1,
    ) -> tuple[Tensor, ...]:
        """The target regions of this rank. Collective: every rank of the group calls it.

        As `Exchange.apply` for each section, in one collective, and one in backward.

        Args:
            tensors: The source region of each section, of one dtype and device, any strides.
            collectives: Collectives of the group over which the layouts are split.
            packing: The packing of messages where rows are exchanged for columns; torch by default.
            fused: Number of first sections to return as one tensor, side by side along the last
                dimension; nothing is copied for it where rows are exchanged for columns.

        Returns:
            The target regions; views of one buffer where rows are exchanged for columns.

        Raises:
            LayoutError: Another number of tensors, several dtypes or devices, a tensor that is not
                the source region of its section, a group of another size, or `fused` less than 1
                or more than the sections; raised before anything is sent.
        """
        self._check(tensors, collectives, fused)
        is_flat = all(x.dim() == 2 for x in tensors)
        way = self._way(collectives.rank, tensors[0].device, fused if is_flat else 1)
        parts = run_way(way, self.exchanges, tuple(tensors), collectives, packing)
        if len(parts) > len(tensors) - fused + 1:
            return torch.cat(parts[:fused], -1), *parts[fused:]
        return parts

    def _way(self, rank: int, device: torch.device, fused: int) -> Way:
        known: dict[tuple[int, torch.device, int], Way] = self.__dict__.setdefault("_known", {})
        if (rank, device, fused) not in known:
            known[rank, device, fused] = choose_way(self.exchanges, rank, device, fused=fused)
        return known[rank, device, fused]

    def _check(self, tensors: Sequence[Tensor], collectives: Collectives, fused: int) -> None:
        kinds = {(x.dtype, x.device) for x in tensors}
        if len(tensors) != len(self.exchanges) or len(kinds) != 1 or not 1 <= fused <= len(tensors):
            raise LayoutError(
                f"Exchange.sections of {len(self.exchanges)}: apply with fused={fused}",
                found=f"{len(tensors)} tensors of {sorted(map(str, kinds))}",
                why="Every exchange has a tensor, and one message has one dtype and device.",
                fix="Pass one tensor for each exchange, all alike, and fuse at most all of them.",
            )
        for one, x in zip(self.exchanges, tensors, strict=True):
            one.check_region(x, collectives)
