"""Which way an exchange runs, and the one function that runs it and its gradient.

| from | to | way |
|---|---|---|
| rows by rank | other rows by rank | `rows`: whole rows, one index on either side |
| rows by rank, all columns | all rows, columns by rank, or the reverse | `columns` |
| rows by rank | everything on every rank | `columns`, as an all-gather |
| any regions | any regions | `steps`: a part for each peer |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoints
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.columns import RowsAndColumns, ToColumns, ToRows
from pcomm.core.exchange.packing import ColumnShards, Packing, TorchPacking
from pcomm.core.exchange.rows import RowMoves
from pcomm.core.exchange.steps import PeerSteps
from pcomm.core.layout import Layout

if TYPE_CHECKING:
    from pcomm.core.exchange.exchange import Exchange

__all__ = ["Way", "choose_way", "run_way"]


class Way(Protocol):
    """A linear map of the sections of all ranks, in one collective."""

    # Whether sections have two dimensions: rows and all others.
    is_flat: ClassVar[bool]

    @property
    def adjoint(self) -> Way:
        """The way of the gradients; for a bijection also the way back."""
        ...

    def move(
        self, tensors: Sequence[Tensor], collectives: Collectives, packing: Packing
    ) -> tuple[Tensor, ...]:
        """The sections of this rank afterwards, without recording. Collective."""
        ...


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


def choose_way(
    exchanges: Sequence[Exchange], rank: int, device: torch.device, *, fused: int = 1
) -> Way:
    """The fastest way of these exchanges in one message.

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


def run_way(
    way: Way,
    exchanges: Sequence[Exchange],
    tensors: tuple[Tensor, ...],
    collectives: Collectives,
    packing: Packing | None,
) -> tuple[Tensor, ...]:
    """The sections of this rank afterwards, differentiable. Collective, and again in backward."""
    packing = packing or TorchPacking()
    if not way.is_flat or all(x.dim() == 2 for x in tensors):
        return _recorded(way, tensors, collectives, packing)
    pairs = zip(exchanges, tensors, strict=True)
    shapes = [one.new_shape(x.shape, collectives.rank) for one, x in pairs]
    flat = tuple(x.flatten(1) if x.dim() > 1 else x[:, None] for x in tensors)
    results = _recorded(way, flat, collectives, packing)
    return tuple(y.reshape(shape) for y, shape in zip(results, shapes, strict=True))


def _recorded(
    way: Way, tensors: tuple[Tensor, ...], collectives: Collectives, packing: Packing
) -> tuple[Tensor, ...]:
    """`way.move`, recorded where a gradient is asked for."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return way.move(tensors, collectives, packing)
    return with_adjoints(
        tensors,
        lambda *tensors: way.move(tensors, collectives, packing),
        lambda *gradients: _recorded(way.adjoint, gradients, collectives, packing),
    )


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
