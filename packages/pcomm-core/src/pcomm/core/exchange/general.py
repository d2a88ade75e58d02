"""The general algorithm of an exchange: for each peer the part that it needs, along any dimensions.

Parts travel in the order in which they lie on the sender, so packing is mostly slicing. Several
sections travel in one message: for each peer its parts of all sections, one after another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.exchange.fast import Packing
from pcomm.core.exchange.positions import Placed, inverse_order, overlap, placed_runs
from pcomm.core.layout import Layout

__all__ = ["PeerParts", "PeerSteps"]


# Positions along one dimension: a slice where they are neighbours, else an index tensor.
_Selection = slice | Tensor
# Those of a region, by dimension.
_Part = dict[int, _Selection]


@dataclass(frozen=True, eq=False)
class PeerParts:
    """What one rank packs for each peer of one section, and where what it gets belongs.

    Args:
        send: The part of the region that each peer gets.
        receive: The places in the new region of the part from each peer.
        sizes: Lengths of the old region along the dimensions of the exchange.
        new_sizes: Lengths of the new region.
        adds: True if parts are added up where they meet, and zeros stay where none belongs.
        adds_back: True if the adjoint adds parts up where they meet.
    """

    send: list[_Part]
    receive: list[_Part]
    sizes: dict[int, int]
    new_sizes: dict[int, int]
    adds: bool
    adds_back: bool

    @classmethod
    def build(
        cls,
        owned: Mapping[int, Sequence[Placed]],
        source: Mapping[int, Layout],
        target: Mapping[int, Layout],
        rank: int,
        device: torch.device,
        *,
        is_bijection: bool,
    ) -> PeerParts:
        """The parts of `rank` on its way from `source` to `target`.

        Args:
            owned: The runs that each rank sends, by dimension.
            source: Layout of each dimension before.
            target: Layout of each dimension after.
            rank: The rank whose parts these are.
            device: Device of the index tensors.
            is_bijection: True if every element is on one rank before and after.
        """
        needed = {d: [placed_runs(x, peer) for peer in range(x.size)] for d, x in target.items()}
        peers = range(len(next(iter(owned.values()))))

        def parts(side: int, pairs: Mapping[int, tuple[Placed, Placed]]) -> _Part:
            return {d: _selection(overlap(*pair)[side], device) for d, pair in pairs.items()}

        return cls(
            [parts(0, {d: (owned[d][rank], needed[d][p]) for d in owned}) for p in peers],
            [parts(1, {d: (owned[d][p], needed[d][rank]) for d in owned}) for p in peers],
            {dim: layout.sizes[rank] for dim, layout in source.items()},
            {dim: layout.sizes[rank] for dim, layout in target.items()},
            adds=False,
            adds_back=not is_bijection,
        )

    @property
    def adjoint(self) -> PeerParts:
        """The parts on the way back: copies are added up, and what was not sent is zero."""
        return PeerParts(
            self.receive, self.send, self.new_sizes, self.sizes, self.adds_back, self.adds
        )

    def num_sent(self, shape: Sequence[int]) -> list[int]:
        """Number of elements for each peer, of a region of `shape`."""
        return [math.prod(_lengths(part, shape)) for part in self.send]

    def pack(self, x: Tensor) -> list[Tensor]:
        """One flat tensor for each peer."""
        return [_take(x, part).reshape(-1) for part in self.send]

    def arriving(self, shape: Sequence[int]) -> list[list[int]]:
        """The shape of the part from each peer, of a region that had `shape` before."""
        return [_lengths(part, self._new_shape(shape)) for part in self.receive]

    def unpack(self, parts: list[Tensor], shape: Sequence[int]) -> Tensor:
        """The new region, in which each peer's part lies where it belongs.

        Parts that differ along one dimension are laid end to end there and, if their positions
        are mixed, gathered by the inverse permutation; others are written one by one.
        """
        new_shape = self._new_shape(shape)
        used = [(p, step) for p, step in zip(parts, self.receive, strict=True) if p.numel()]
        if self.adds:
            return _sum(used, parts[0].new_zeros(new_shape))
        if not used:
            return parts[0].new_empty(new_shape)
        split = [d for d in self.receive[0] if any(p.shape[d] != new_shape[d] for p, _ in used)]
        if len(split) > 1 or any(_is_mixed(s[d], d in split) for _, s in used for d in s):
            result = used[0][0].new_empty(new_shape)
            for part, step in used:
                _place(result, part, step, accumulate=False)
            return result
        dim = split[0] if split else min(self.receive[0])
        together = torch.cat([part for part, _ in used], dim)
        places = [step[dim] for _, step in used]
        if all(isinstance(p, slice) for p in places) and _ascend(places):
            return together
        return together.index_select(dim, _inverse(places, together.device))

    def _new_shape(self, shape: Sequence[int]) -> list[int]:
        return [self.new_sizes.get(dim, length) for dim, length in enumerate(shape)]


@dataclass(frozen=True, eq=False)
class PeerSteps:
    """The parts of all sections in one all-to-all."""

    sections: tuple[PeerParts, ...]
    is_flat: ClassVar[bool] = False

    @property
    def adjoint(self) -> PeerSteps:
        """The algorithm of the gradients."""
        return PeerSteps(tuple(section.adjoint for section in self.sections))

    def move(
        self, tensors: Sequence[Tensor], collectives: Collectives, packing: Packing
    ) -> tuple[Tensor, ...]:
        """The new regions. Collective: one all-to-all."""
        pairs = list(zip(self.sections, tensors, strict=True))
        packed = zip(*(section.pack(x) for section, x in pairs), strict=True)
        shapes = list(zip(*(section.arriving(x.shape) for section, x in pairs), strict=True))
        sent = zip(*(section.num_sent(x.shape) for section, x in pairs), strict=True)
        received = collectives.all_to_all(
            torch.cat([part for peer in packed for part in peer]),
            send_sizes=[sum(peer) for peer in sent],
            receive_sizes=[sum(map(math.prod, peer)) for peer in shapes],
        )
        sizes = [math.prod(shape) for peer in shapes for shape in peer]
        parts = iter(received.split(sizes))
        arrived = [[next(parts).view(shape) for shape in peer] for peer in shapes]
        of_section = zip(*arrived, strict=True)
        return tuple(
            section.unpack(list(own), x.shape)
            for (section, x), own in zip(pairs, of_section, strict=True)
        )


def _is_mixed(selection: _Selection, is_split: bool) -> bool:
    """Whether a dimension that is not split is permuted, so that one gather cannot do it."""
    return not is_split and not isinstance(selection, slice)


def _ascend(places: Sequence[_Selection]) -> bool:
    starts = [place.start for place in places if isinstance(place, slice)]
    return starts == sorted(starts)


def _inverse(places: Sequence[_Selection], device: torch.device) -> Tensor:
    """Index that brings rows lying in the order of `places` into ascending order."""
    return inverse_order(torch.cat([_as_index(place, device) for place in places]))


def _sum(used: Sequence[tuple[Tensor, _Part]], zeros: Tensor) -> Tensor:
    """The parts added up in the order of the peers, in fp32 where elements are shorter."""
    is_short = zeros.is_floating_point() and zeros.element_size() < 4
    total = zeros.float() if is_short else zeros
    for part, step in used:
        _place(total, part.to(total.dtype), step, accumulate=True)
    return total.to(zeros.dtype)


def _place(result: Tensor, part: Tensor, step: _Part, *, accumulate: bool) -> None:
    """Write or add `part` where it belongs."""
    listed: dict[int, Tensor] = {}
    for dim, selection in step.items():
        if isinstance(selection, slice):
            result = result.narrow(dim, selection.start, _count(selection))
        else:
            listed[dim] = selection
    if not listed:
        _ = result.add_(part) if accumulate else result.copy_(part)
        return
    # Index tensors pair up element by element unless they are broadcast.
    front, dims = list(range(len(listed))), list(listed)
    index = tuple(x.view([-1 if d == dim else 1 for d in dims]) for dim, x in listed.items())
    result.movedim(dims, front).index_put_(index, part.movedim(dims, front), accumulate=accumulate)


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


def _take(x: Tensor, step: _Part) -> Tensor:
    for dim, selection in step.items():
        if isinstance(selection, slice):
            x = x.narrow(dim, selection.start, _count(selection))
        else:
            x = x.index_select(dim, selection)
    return x
