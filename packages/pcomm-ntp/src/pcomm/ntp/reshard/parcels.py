"""Parcels: boxes of tensors that one rank sends another, in rounds of bounded size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.reshard.planned_moves import Move, moves
from pcomm.ntp.reshard.spread_tensors import SpreadTensor

__all__ = ["Outline", "Traffic", "in_rounds", "packed", "traffic", "unpack"]


class Outline(NamedTuple):
    """Boxes of tensors with the dimension along which they may be cut."""

    boxes: list[Tensor]
    dim: int


class Traffic(NamedTuple):
    """What this rank sends and gets, by the place of the peer in the group.

    Attributes:
        sent: Boxes for each peer, in an order that both know.
        received: Boxes from each peer, in the same order.
        least_bytes: Bytes of the units that this rank needs and does not hold.
    """

    sent: dict[int, list[Outline]]
    received: dict[int, list[Outline]]
    least_bytes: int


def traffic(
    old: Plan,
    new: Plan,
    rank: int,
    ranks: Sequence[int],
    tensors: Iterable[SpreadTensor],
    holders: Collection[int],
) -> Traffic:
    """What a rank sends and gets, from plans and its tensors. Local.

    Raises:
        StateLostError: No rank holds some units.
    """
    place = {one: i for i, one in enumerate(ranks)}
    stage = new.topology.coordinates(rank).get("pp", 0)
    known: dict[str, tuple[Move, ...]] = {}
    found = Traffic({}, {}, 0)
    least = 0
    for one in tensors:
        if one.parameter not in known:
            known[one.parameter] = moves(old, new, one.parameter, holders=holders, stage=stage)
        if one.target is not None:
            start, stop = one.target.held
            kept = 0
            if one.source is not None:
                kept = max(0, min(stop, one.source.held[1]) - max(start, one.source.held[0]))
            least += (stop - start - kept) * one.unit_bytes()
        for move in known[one.parameter]:
            interval = move.start, move.stop
            if move.source == rank:
                assert one.source is not None
                boxes = Outline(list(one.boxes(one.source, interval)), one.dim)
                found.sent.setdefault(place[move.target], []).append(boxes)
            elif move.target == rank:
                assert one.target is not None
                boxes = Outline(list(one.boxes(one.target, interval)), one.dim)
                found.received.setdefault(place[move.source], []).append(boxes)
    return found._replace(least_bytes=least)


def in_rounds(outlines: Iterable[Outline], most_bytes: int) -> list[list[Tensor]]:
    """Views of the boxes, cut and dealt out so that no round has more than `most_bytes`.

    One position of a box is not cut, whatever its size. Both ends of a message cut it alike.
    """
    rounds: list[list[Tensor]] = []
    left = 0
    for boxes, dim in outlines:
        for box in boxes:
            start, length = 0, box.shape[dim]
            if not box.numel():
                continue
            each = box.numel() // length * box.element_size()
            while start < length:
                if left < each:
                    rounds.append([])
                    left = most_bytes
                count = max(1, min(length - start, left // each))
                rounds[-1].append(box.narrow(dim, start, count))
                left -= count * each
                start += count
    return rounds


def packed(views: Iterable[Tensor], device: torch.device) -> Tensor:
    """The bytes of all views, one after another."""
    parts = [view.contiguous().view(-1).view(torch.uint8) for view in views]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(data: Tensor, views: Iterable[Tensor]) -> None:
    """Write bytes that `packed` joined into views of the same shapes."""
    start = 0
    for view in views:
        size = view.numel() * view.element_size()
        part = data[start : start + size]
        if part.storage_offset() % view.element_size():
            # A view of another data type begins at a multiple of its elements.
            part = part.clone()
        view.copy_(part.view(view.dtype).view(view.shape))
        start += size
