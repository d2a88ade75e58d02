"""From one layout of a tensor to another in one collective.

A tensor's *region* on a rank is the product of one layout per dimension. An `Exchange` is
computed on the host from the source and the target layouts: which part of my region each peer
needs, and where the parts that I get belong. It packs, does **one** `all_to_all`, unpacks. Several
sections, tensors with layouts of their own, travel in the same message.

| element is on | forward | backward |
|---|---|---|
| one rank before and after | moves | moves back: an exchange is a bijection then |
| several ranks after (a cover) | is copied | the gradients of the copies are added up |
| several ranks before | comes from its owner | the gradient goes to the owner, others get zero |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pcomm.core.errors import LayoutError
from pcomm.core.exchange.owners import is_held_once, missing, owned_runs
from pcomm.core.exchange.packing import Packing
from pcomm.core.exchange.rows import RowMoves
from pcomm.core.exchange.sections import SectionExchange
from pcomm.core.exchange.steps import PeerParts
from pcomm.core.exchange.ways import Way, choose_way, run_way
from pcomm.core.layout import Layout

if TYPE_CHECKING:
    from pcomm.core.collectives.protocol import Collectives

__all__ = ["Exchange"]


@dataclass(frozen=True)
class Exchange:
    """The plan that turns `source` regions into `target` regions of the same tensor.

    Args:
        source: Layout of each dimension that is split before, by dimension number.
        target: Layouts of the same dimensions after. Other dimensions are not split.
        owners: Ranks that may send, preferred first: of the ranks that hold a position it comes
            from the first one. All ranks in their order by default.

    Example: tokens by rank with all heads, to all tokens with heads by rank:

        Exchange({0: Layout.even(T, n), 1: Layout.whole(H, n)},
                 {0: Layout.whole(T, n), 1: Layout.even(H, n)})

    Raises:
        LayoutError: The dimensions, lengths or numbers of ranks of both sides differ; an element
            is held by no owner before, or by no rank after; regions that are split along several
            dimensions overlap in part; `owners` are not different ranks.
    """

    source: Mapping[int, Layout]
    target: Mapping[int, Layout]
    owners: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # Copies: a plan does not change with the mappings that it was made from.
        for side in ("source", "target"):
            object.__setattr__(self, side, dict(getattr(self, side)))
        source = {dim: (layout.length, layout.size) for dim, layout in self.source.items()}
        target = {dim: (layout.length, layout.size) for dim, layout in self.target.items()}
        sizes = {size for _, size in source.values()}
        if source != target or len(sizes) != 1 or min(source) < 0:
            raise LayoutError(
                "Exchange",
                found=f"{{dim: (length, ranks)}} is {source} before and {target} after",
                why="Both sides describe the same tensor, over the same ranks.",
                fix="Name the same dimensions >= 0 with equal lengths and numbers of ranks.",
            )
        if self.owners is not None:
            object.__setattr__(self, "owners", tuple(self.owners))
        self._check_owners()
        if self.owners is not None or not is_held_once(self.source):
            _check_complete("source", self.source, self._senders)
        if not is_held_once(self.target):
            _check_complete("target", self.target, range(self.size))

    def __hash__(self) -> int:
        # Mappings are equal in whatever order they were filled.
        return hash((frozenset(self.source.items()), frozenset(self.target.items()), self.owners))

    @staticmethod
    def sections(exchanges: Iterable[Exchange]) -> SectionExchange:
        """The exchanges of several tensors in one message.

        Raises:
            LayoutError: No exchange, or exchanges over different numbers of ranks.
        """
        return SectionExchange(tuple(exchanges))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return next(iter(self.source.values())).size

    @cached_property
    def is_bijection(self) -> bool:
        """Whether every element is on exactly one rank before and after."""
        return is_held_once(self.source) and is_held_once(self.target)

    @cached_property
    def moves_rows(self) -> bool:
        """Whether whole rows go from one partition of the first dimension to another."""
        whole = [d for d, layout in self.source.items() if layout.is_whole and d]
        return (
            self.is_bijection
            and {0, *whole} == set(self.source)
            and all(self.target[d].is_whole for d in whole)
        )

    @cached_property
    def inverse(self) -> Exchange:
        """The exchange the other way round. For a bijection it is also the gradient of this one."""
        back = Exchange(self.target, self.source)
        if self.is_bijection:
            back.__dict__.update(_ways=self._ways, _is_turned=not self._is_turned)
        return back

    def sent_elements(self, rank: int, shape: Sequence[int]) -> int:
        """Number of elements that `rank` sends to others when its source region has `shape`. Local.

        Raises:
            LayoutError: No layout has such a rank.
        """
        self._check_rank(rank)
        cpu = torch.device("cpu")
        if self.moves_rows:
            moves = RowMoves.of(self.source[0], self.target[0], rank, cpu)
            sent = [count * math.prod(shape[1:]) for count in moves.send_sizes or ()]
        else:
            sent = self.parts(rank, cpu).num_sent(shape)
        return sum(sent) - sent[rank]

    def apply(
        self, x: Tensor, collectives: Collectives, *, packing: Packing | None = None
    ) -> Tensor:
        """The target region of this rank. Collective: every rank of the group calls it.

        One all-to-all, or one all-gather where every rank gets everything. Differentiable whenever
        `x` requires a gradient: backward is the adjoint, again one collective, whether or not the
        collectives are differentiable themselves.

        Args:
            x: The source region of this rank, any strides.
            collectives: Collectives of the group over which the layouts are split.
            packing: The packing of messages where rows are exchanged for columns; torch by default.

        Returns:
            A new tensor with the target's shape; `x` itself where one rank has nothing to move.

        Raises:
            LayoutError: `x` does not have the shape of the source region, or the group another
                number of ranks; raised before anything is sent.
        """
        self.check_region(x, collectives)
        if self.size == 1 and self.source == self.target and self.is_bijection:
            return x
        way = self.way(collectives.rank, x.device)
        (result,) = run_way(way, (self,), (x,), collectives, packing)
        return result

    def prepare(self, rank: int, device: torch.device) -> None:
        """Make the index tensors of `rank` on `device` now, not at the first use.

        Those of backward are among them, and for a bijection those of `inverse`. Local.

        Raises:
            LayoutError: No layout has such a rank.
        """
        self._check_rank(rank)
        self.way(rank, device)

    # -- for the ways --------------------------------------------------------------------

    def way(self, rank: int, device: torch.device) -> Way:
        """How `rank` carries it out, made once for each device and shared with `inverse`."""
        ways, key = self._ways, (rank, device)
        if key not in ways:
            made = choose_way((self,), rank, device)
            ways[key] = made.adjoint if self._is_turned else made
        return ways[key].adjoint if self._is_turned else ways[key]

    def new_shape(self, shape: Sequence[int], rank: int) -> list[int]:
        """The shape of the target region of `rank` when its source region has `shape`."""
        sizes = {dim: layout.sizes[rank] for dim, layout in self.target.items()}
        return [sizes.get(dim, length) for dim, length in enumerate(shape)]

    def parts(self, rank: int, device: torch.device) -> PeerParts:
        """What `rank` packs for each peer, by the general way."""
        owned = owned_runs(self.source, None if self.is_bijection else self._senders)
        return PeerParts.build(
            owned, self.source, self.target, rank, device, is_bijection=self.is_bijection
        )

    def check_region(self, x: Tensor, collectives: Collectives) -> None:
        """Refuse a tensor or a group of another size, before anything is sent."""
        if collectives.size != self.size:
            raise LayoutError(
                "Exchange.apply",
                found=f"a group of {collectives.size} ranks, layouts over {self.size}",
                why="The plan names one region for each rank of the group.",
                fix="Build the layouts with the size of the group that executes the exchange.",
            )
        sizes, shape = self._region_sizes[collectives.rank], x.shape
        if any(dim >= len(shape) or shape[dim] != size for dim, size in sizes):
            raise LayoutError(
                f"Exchange.apply: rank {collectives.rank}, {{dim: size}} {dict(sizes)}",
                found=f"a tensor of shape {tuple(x.shape)}",
                why="The tensor must be the region that the source layouts give this rank.",
                fix="Pass this rank's shard, or build the exchange with the layouts it has.",
            )

    # A plan is immutable; its ways are a memory of it, in the direction that is not turned.
    @cached_property
    def _ways(self) -> dict[tuple[int, torch.device], Way]:
        return {}

    @cached_property
    def _is_turned(self) -> bool:
        return False

    @cached_property
    def _region_sizes(self) -> list[list[tuple[int, int]]]:
        sides = self.source.items()
        return [[(dim, x.sizes[rank]) for dim, x in sides] for rank in range(self.size)]

    @property
    def _senders(self) -> Sequence[int]:
        return range(self.size) if self.owners is None else self.owners

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise LayoutError(
                f"Exchange: rank {rank}",
                found=f"layouts over {self.size} ranks",
                why="The plan has regions for the ranks of its layouts alone.",
                fix=f"Name the place of a rank in its group, from 0 to {self.size - 1}.",
            )

    def _check_owners(self) -> None:
        chosen = self._senders
        if not chosen or len(set(chosen)) < len(chosen) or set(chosen) - set(range(self.size)):
            raise LayoutError(
                f"Exchange: owners {self.owners}",
                found=f"layouts over {self.size} ranks",
                why="Owners are the ranks that may send, each named once, preferred first.",
                fix=f"Name different ranks from 0 to {self.size - 1}.",
            )


def _check_complete(side: str, layouts: Mapping[int, Layout], ranks: Sequence[int]) -> None:
    """Prove that every element is on one of the ranks, and that one of these can be its owner."""
    if problem := missing(layouts, ranks):
        raise LayoutError(
            f"Exchange: {side} {[layout.describe() for layout in layouts.values()]}",
            found=problem,
            why="Every element is on some rank before and after, and comes from one of them.",
            fix="Cover the tensor; if several dimensions are split, by regions that are equal or "
            "do not overlap.",
        )
