"""Exchange between two layouts: planned once, differentiable, of one tensor or of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pcomm.core.collectives.autograd import with_adjoints
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.exchange.fast import (
    ColumnShards,
    Packing,
    RowMoves,
    RowsAndColumns,
    ToColumns,
    TorchPacking,
    ToRows,
)
from pcomm.core.exchange.general import PeerParts, PeerSteps
from pcomm.core.exchange.positions import is_held_once, missing, owned_runs
from pcomm.core.layout import Layout

__all__ = [
    "Exchange",
    "ExchangeAlgorithm",
    "SectionExchange",
]


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
            back.__dict__.update(_algorithms=self._algorithms, _is_turned=not self._is_turned)
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
        algorithm = self.algorithm(collectives.rank, x.device)
        (result,) = _run_algorithm(algorithm, (self,), (x,), collectives, packing)
        return result

    def prepare(self, rank: int, device: torch.device) -> None:
        """Make the index tensors of `rank` on `device` now, not at the first use.

        Those of backward are among them, and for a bijection those of `inverse`. Local.

        Raises:
            LayoutError: No layout has such a rank.
        """
        self._check_rank(rank)
        self.algorithm(rank, device)

    # -- for the algorithms --------------------------------------------------------------------

    def algorithm(self, rank: int, device: torch.device) -> ExchangeAlgorithm:
        """How `rank` carries it out, made once for each device and shared with `inverse`."""
        known, key = self._algorithms, (rank, device)
        if key not in known:
            made = _choose_algorithm((self,), rank, device)
            known[key] = made.adjoint if self._is_turned else made
        return known[key].adjoint if self._is_turned else known[key]

    def new_shape(self, shape: Sequence[int], rank: int) -> list[int]:
        """The shape of the target region of `rank` when its source region has `shape`."""
        sizes = {dim: layout.sizes[rank] for dim, layout in self.target.items()}
        return [sizes.get(dim, length) for dim, length in enumerate(shape)]

    def parts(self, rank: int, device: torch.device) -> PeerParts:
        """What `rank` packs for each peer, by the general algorithm."""
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

    # A plan is immutable; its algorithms are a memory of it, in the direction that is not turned.
    @cached_property
    def _algorithms(self) -> dict[tuple[int, torch.device], ExchangeAlgorithm]:
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
        algorithm = self._algorithm(collectives.rank, tensors[0].device, fused if is_flat else 1)
        parts = _run_algorithm(algorithm, self.exchanges, tuple(tensors), collectives, packing)
        if len(parts) > len(tensors) - fused + 1:
            return torch.cat(parts[:fused], -1), *parts[fused:]
        return parts

    def _algorithm(self, rank: int, device: torch.device, fused: int) -> ExchangeAlgorithm:
        known: dict[tuple[int, torch.device, int], ExchangeAlgorithm]
        known = self.__dict__.setdefault("_known", {})
        if (rank, device, fused) not in known:
            known[rank, device, fused] = _choose_algorithm(
                self.exchanges, rank, device, fused=fused
            )
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


class ExchangeAlgorithm(Protocol):
    """A linear map of the sections of all ranks, in one collective."""

    # Whether sections have two dimensions: rows and all others.
    is_flat: ClassVar[bool]

    @property
    def adjoint(self) -> ExchangeAlgorithm:
        """The algorithm of the gradients; for a bijection also that of the way back."""
        ...

    def move(
        self, tensors: Sequence[Tensor], collectives: Collectives, packing: Packing
    ) -> tuple[Tensor, ...]:
        """The sections of this rank afterwards, without recording. Collective."""
        ...


def _choose_algorithm(
    exchanges: Sequence[Exchange], rank: int, device: torch.device, *, fused: int = 1
) -> ExchangeAlgorithm:
    """The fastest algorithm for these exchanges in one message.

    Args:
        exchanges: The exchange of each section.
        rank: The rank that carries it out.
        device: Device of the sections and of the index tensors.
        fused: Number of first sections that become one tensor, where rows become columns.
    """
    first = exchanges[0]
    # What is kept must not be a tensor of inference mode, which training cannot use.
    with torch.inference_mode(False):
        if len(exchanges) == 1 and first.moves_rows:
            return _Rows(RowMoves.of(first.source[0], first.target[0], rank, device))
        for is_reversed in (False, True):
            found = [_rows_and_columns(one, is_reversed=is_reversed) for one in exchanges]
            pairs = [pair for pair in found if pair is not None]
            if len(pairs) < len(exchanges) or any(rows != pairs[0][0] for rows, _ in pairs):
                continue
            has_widths = not is_reversed and all(1 in one.source for one in exchanges)
            shards = tuple(shards for _, shards in pairs)
            plan = RowsAndColumns(pairs[0][0], shards, fused if has_widths else 1)
            plan.order.on(device)
            return ToRows(plan) if is_reversed else ToColumns(plan)
        return PeerSteps(tuple(one.parts(rank, device) for one in exchanges))


def _rows_and_columns(
    exchange: Exchange, *, is_reversed: bool
) -> tuple[Layout, ColumnShards] | None:
    """The rows, and how columns are dealt out, where all of one is exchanged for all of the other.

    The reverse of a cover is another map than its adjoint: it takes one copy, and adds none up.
    """
    source, target = exchange.source, exchange.target
    if is_reversed:
        if not exchange.is_bijection:
            return None
        source, target = target, source
    if exchange.size == 1 or 0 not in source:
        return None
    if not (source[0].is_partition and target[0].is_whole):
        return None
    if set(source) == {0}:
        return source[0], ColumnShards(1, 1, exchange.size, exchange.size)
    if set(source) != {0, 1} or not source[1].is_whole:
        return None
    shards = target[1].derived(ColumnShards.of)
    return None if shards is None else (source[0], shards)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Whole rows of one section, which nothing has to pack."""

    moves: RowMoves
    is_flat: ClassVar[bool] = False

    @property
    def adjoint(self) -> _Rows:
        return _Rows(self.moves.inverse)

    def move(
        self, tensors: Sequence[Tensor], collectives: Collectives, packing: Packing
    ) -> tuple[Tensor, ...]:
        return (self.moves.move(tensors[0], collectives),)


def _run_algorithm(
    algorithm: ExchangeAlgorithm,
    exchanges: Sequence[Exchange],
    tensors: tuple[Tensor, ...],
    collectives: Collectives,
    packing: Packing | None,
) -> tuple[Tensor, ...]:
    """The sections of this rank afterwards, differentiable. Collective, and again in backward."""
    packing = packing or TorchPacking()
    if not algorithm.is_flat or all(x.dim() == 2 for x in tensors):
        return _recorded(algorithm, tensors, collectives, packing)
    pairs = zip(exchanges, tensors, strict=True)
    shapes = [one.new_shape(x.shape, collectives.rank) for one, x in pairs]
    flat = tuple(x.flatten(1) if x.dim() > 1 else x[:, None] for x in tensors)
    results = _recorded(algorithm, flat, collectives, packing)
    return tuple(y.reshape(shape) for y, shape in zip(results, shapes, strict=True))


def _recorded(
    algorithm: ExchangeAlgorithm,
    tensors: tuple[Tensor, ...],
    collectives: Collectives,
    packing: Packing,
) -> tuple[Tensor, ...]:
    """`algorithm.move`, recorded where a gradient is asked for."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return algorithm.move(tensors, collectives, packing)
    return with_adjoints(
        tensors,
        lambda *tensors: algorithm.move(tensors, collectives, packing),
        lambda *gradients: _recorded(algorithm.adjoint, gradients, collectives, packing),
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
