"""From one layout of a tensor to another in one all-to-all.

A tensor's *region* on a rank is the product of one layout per dimension. An `Exchange` is
computed on the host from the source and the target layouts: which part of my region each peer
needs, and where the parts that I get belong. It packs, does **one** `all_to_all`, unpacks.
Since every element is held by exactly one rank before and after, an exchange is a bijection and
its gradient is the exchange the other way round.

The parts travel in the order in which they lie on the sender, so packing is mostly slicing.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.errors import LayoutError
from pcomm.core.exchange.index import inverse_order
from pcomm.core.exchange.rows import RowMoves
from pcomm.core.layout import Layout, Run

if TYPE_CHECKING:
    from pcomm.core.collectives.protocol import Collectives

__all__ = ["Exchange"]

# Positions along one dimension: a slice where they are neighbours, else an index tensor.
_Selection = slice | Tensor


@dataclass(frozen=True)
class Exchange:
    """The plan that turns `source` regions into `target` regions of the same tensor.

    Args:
        source: Layout of each dimension that is split before, by dimension number.
        target: The same dimensions after. Dimensions that neither names are not split.

    Example: tokens by rank with all heads, to all tokens with heads by rank:

        Exchange({0: Layout.even(T, n), 1: Layout.whole(H, n)},
                 {0: Layout.whole(T, n), 1: Layout.even(H, n)})

    Raises:
        LayoutError: The dimensions, lengths or numbers of ranks of both sides differ, or an
            element is held by no rank or by several.
    """

    source: Mapping[int, Layout]
    target: Mapping[int, Layout]

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
        for side, layouts in (("source", self.source), ("target", self.target)):
            _check_covers_once(side, layouts)

    def __hash__(self) -> int:
        # Mappings are equal in whatever order they were filled.
        return hash((frozenset(self.source.items()), frozenset(self.target.items())))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return next(iter(self.source.values())).size

    @cached_property
    def inverse(self) -> Exchange:
        """The exchange the other way round, which is also the gradient of this one."""
        return Exchange(self.target, self.source)

    def sent_elements(self, rank: int, shape: Sequence[int]) -> int:
        """Elements that `rank` sends to others when its source region has `shape`."""
        if self._moves_rows:
            sent = self._rows(rank, torch.device("cpu")).send_sizes
            return (sum(sent) - sent[rank]) * math.prod(shape[1:])
        send = self._steps(rank, torch.device("cpu")).send
        return sum(math.prod(_lengths(s, shape)) for peer, s in enumerate(send) if peer != rank)

    def apply(self, x: Tensor, collectives: Collectives) -> Tensor:
        """The target region of this rank. Collective: every rank of the group calls it.

        Differentiable whenever `x` requires a gradient: backward is the inverse exchange, again
        one all-to-all, whether or not the collectives are differentiable themselves.

        Args:
            x: The source region of this rank, any strides.
            collectives: Those of the group over which the layouts are split.

        Returns:
            A new tensor with the target's shape; `x` itself where one rank has nothing to move.

        Raises:
            LayoutError: `x` does not have the shape of the source region, or the group another
                number of ranks; raised before anything is sent.
        """
        self._check_region(x, collectives)
        if self.size == 1 and self.source == self.target:
            return x
        if x.requires_grad and torch.is_grad_enabled():
            return with_adjoint(
                x,
                lambda x: self._move(x, collectives),
                lambda gradient: self.inverse.apply(gradient, collectives),
            )
        return self._move(x, collectives)

    def prepare(self, rank: int, device: torch.device) -> None:
        """Make the index tensors of `rank` on `device` now, for both ways, not at the first use."""
        for way in (self, self.inverse):
            _ = way._rows(rank, device) if way._moves_rows else way._steps(rank, device)

    # -- how it is done ------------------------------------------------------------------

    @cached_property
    def _moves_rows(self) -> bool:
        whole = [d for d, layout in self.source.items() if layout.is_whole]
        return {0, *whole} == set(self.source) and all(self.target[d].is_whole for d in whole)

    def _move(self, x: Tensor, collectives: Collectives) -> Tensor:
        if self._moves_rows:
            return self._rows(collectives.rank, x.device).move(x, collectives)
        steps = self._steps(collectives.rank, x.device)
        sizes = {dim: layout.sizes[collectives.rank] for dim, layout in self.target.items()}
        shape = [sizes.get(dim, length) for dim, length in enumerate(x.shape)]
        part_shapes = [_lengths(step, shape) for step in steps.receive]
        receive_sizes = [math.prod(part_shape) for part_shape in part_shapes]
        received = collectives.all_to_all(
            torch.cat([_take(x, step).reshape(-1) for step in steps.send]),
            send_sizes=[math.prod(_lengths(step, x.shape)) for step in steps.send],
            receive_sizes=receive_sizes,
        )
        parts = [p.view(s) for p, s in zip(received.split(receive_sizes), part_shapes, strict=True)]
        return steps.assemble(parts, shape)

    def _steps(self, rank: int, device: torch.device) -> _Steps:
        # Filled on first use: a plan is immutable, its steps are a memory of it per device.
        known: dict[tuple[int, torch.device], _Steps] = self.__dict__.setdefault("_known", {})
        if (rank, device) not in known:
            known[rank, device] = _Steps.build(self, rank, device)
        return known[rank, device]

    def _rows(self, rank: int, device: torch.device) -> RowMoves:
        known: dict[tuple[int, torch.device], RowMoves] = self.__dict__.setdefault(
            "_known_rows", {}
        )
        if (rank, device) not in known:
            moves = RowMoves.of(self.source[0], self.target[0], rank, device)
            known[rank, device] = moves
            # The way back is known as well, and will be asked for.
            self.inverse.__dict__.setdefault("_known_rows", {})[rank, device] = moves.inverse
        return known[rank, device]

    def _check_region(self, x: Tensor, collectives: Collectives) -> None:
        if collectives.size != self.size:
            raise LayoutError(
                "Exchange.apply",
                found=f"a group of {collectives.size} ranks, layouts over {self.size}",
                why="The plan names one region for each rank of the group.",
                fix="Build the layouts with the size of the group that executes the exchange.",
            )
        sizes = {dim: layout.sizes[collectives.rank] for dim, layout in self.source.items()}
        if any(dim >= x.dim() or x.shape[dim] != size for dim, size in sizes.items()):
            raise LayoutError(
                f"Exchange.apply: rank {collectives.rank}, {{dim: size}} {sizes}",
                found=f"a tensor of shape {tuple(x.shape)}",
                why="The tensor must be the region that the source layouts give this rank.",
                fix="Pass this rank's shard, or build the exchange with the layouts it has.",
            )


@dataclass(frozen=True, eq=False)
class _Steps:
    """What one rank packs for each peer, and where what it gets from each belongs."""

    send: list[dict[int, _Selection]]
    receive: list[dict[int, _Selection]]

    @classmethod
    def build(cls, exchange: Exchange, rank: int, device: torch.device) -> _Steps:
        send, receive = [], []
        for peer in range(exchange.size):
            out: dict[int, _Selection] = {}
            into: dict[int, _Selection] = {}
            for dim, source in exchange.source.items():
                target = exchange.target[dim]
                out[dim] = _selection(_overlap(source, rank, target, peer)[0], device)
                into[dim] = _selection(_overlap(source, peer, target, rank)[1], device)
            send.append(out)
            receive.append(into)
        return cls(send, receive)

    def assemble(self, parts: list[Tensor], shape: list[int]) -> Tensor:
        """The tensor of `shape` in which each peer's part lies where it belongs.

        Parts that differ along one dimension are laid end to end there and, if their positions
        are mixed, gathered by the inverse permutation; others are written one by one.
        """
        used = [(p, step) for p, step in zip(parts, self.receive, strict=True) if p.numel()]
        if not used:
            return parts[0].new_empty(shape)
        split = [d for d in self.receive[0] if any(p.shape[d] != shape[d] for p, _ in used)]
        if len(split) > 1 or any(_is_mixed(s[d], d in split) for _, s in used for d in s):
            return _write(used, shape)
        dim = split[0] if split else min(self.receive[0])
        together = torch.cat([part for part, _ in used], dim)
        places = [step[dim] for _, step in used]
        if all(isinstance(p, slice) for p in places) and _ascend(places):
            return together
        return together.index_select(dim, _inverse(places, together.device))


def _is_mixed(selection: _Selection, is_split: bool) -> bool:
    """Whether a dimension that is not split is permuted, so that one gather cannot do it."""
    return not is_split and not isinstance(selection, slice)


def _ascend(places: Sequence[_Selection]) -> bool:
    starts = [place.start for place in places if isinstance(place, slice)]
    return starts == sorted(starts)


def _inverse(places: Sequence[_Selection], device: torch.device) -> Tensor:
    """Index that brings rows lying in the order of `places` into ascending order."""
    return inverse_order(torch.cat([_as_index(place, device) for place in places]))


def _write(used: list[tuple[Tensor, dict[int, _Selection]]], shape: list[int]) -> Tensor:
    result = used[0][0].new_empty(shape)
    for part, step in used:
        index: list[Any] = [slice(None)] * len(shape)
        listed = [dim for dim, selection in step.items() if not isinstance(selection, slice)]
        for dim, selection in step.items():
            # Several index tensors pair up element by element unless they are broadcast.
            if dim in listed and len(listed) > 1:
                wide = [-1 if other == dim else 1 for other in listed]
                index[dim] = _as_index(selection, part.device).view(wide)
            else:
                index[dim] = selection
        if len(listed) > 1:
            # Index tensors that are not neighbours move to the front; a view avoids that.
            moved = result.movedim(listed, list(range(len(listed))))
            rest = [index[d] for d in range(len(shape)) if d not in listed]
            front = [index[d] for d in listed]
            moved[tuple(front + rest)] = part.movedim(listed, list(range(len(listed))))
        else:
            result[tuple(index)] = part
    return result


def _overlap(
    source: Layout, sender: int, target: Layout, receiver: int
) -> tuple[list[range], list[range]]:
    """Positions that `sender` holds and `receiver` needs, as local positions on both sides.

    Both lists stand in the sender's order, so element i of one is element i of the other.
    """
    mine: list[range] = []
    theirs: list[range] = []
    offsets = itertools.accumulate((run.length for run in target.runs[receiver]), initial=0)
    wanted = sorted(zip(target.runs[receiver], offsets, strict=False), key=_start)
    stops = [run.stop for run, _ in wanted]
    local = 0
    for run in source.runs[sender]:
        # Runs of one rank do not overlap, so their stops ascend with their starts.
        for need, offset in itertools.islice(wanted, bisect.bisect_right(stops, run.start), None):
            first, last = max(run.start, need.start), min(run.stop, need.stop)
            if first >= last:
                break
            mine.append(range(local + first - run.start, local + last - run.start))
            theirs.append(range(offset + first - need.start, offset + last - need.start))
        local += run.length
    return mine, theirs


def _start(placed: tuple[Run, int]) -> int:
    return placed[0].start


def _selection(ranges: list[range], device: torch.device) -> _Selection:
    if all(one.stop == two.start for one, two in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop) if ranges else slice(0, 0)
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges]).to(device)


def _as_index(selection: _Selection, device: torch.device) -> Tensor:
    if isinstance(selection, slice):
        return torch.arange(selection.start, selection.stop, device=device)
    return selection


def _count(selection: _Selection) -> int:
    if isinstance(selection, slice):
        return int(selection.stop) - int(selection.start)
    return selection.numel()


def _lengths(step: Mapping[int, _Selection], shape: Sequence[int]) -> list[int]:
    return [_count(step[dim]) if dim in step else n for dim, n in enumerate(shape)]


def _take(x: Tensor, step: Mapping[int, _Selection]) -> Tensor:
    for dim, selection in step.items():
        if isinstance(selection, slice):
            x = x.narrow(dim, selection.start, _count(selection))
        else:
            x = x.index_select(dim, selection)
    return x


def _check_covers_once(side: str, layouts: Mapping[int, Layout]) -> None:
    """Prove that the regions cover the tensor once: enough elements, and no two regions meet."""
    size = next(iter(layouts.values())).size
    total = math.prod(layout.length for layout in layouts.values())
    held = [math.prod(layout.sizes[rank] for layout in layouts.values()) for rank in range(size)]
    problem = "" if sum(held) == total else f"ranks hold {held} elements of {total}"
    split = [layout for layout in layouts.values() if not layout.is_whole]
    if not problem and not (len(split) == 1 and split[0].is_partition):
        filled = [rank for rank in range(size) if held[rank]]
        for one, two in itertools.combinations(filled, 2):
            if all(_overlap(layout, one, layout, two)[0] for layout in layouts.values()):
                problem = f"ranks {one} and {two} hold the same element"
                break
    if problem:
        raise LayoutError(
            f"Exchange: {side} {[layout.describe() for layout in layouts.values()]}",
            found=problem,
            why="An exchange is a bijection: each element is on exactly one rank before and after.",
            fix="Split one dimension completely, or several so that the regions do not overlap.",
        )
