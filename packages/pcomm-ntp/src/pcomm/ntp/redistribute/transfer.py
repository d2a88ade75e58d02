"""`redistribute`: state goes from one plan to another, each rank getting exactly what it lacks.

Boxes of tensors travel in rounds of bounded size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.core import Group
from pcomm.core.errors import TopologyError
from pcomm.core.exchange import RowMoves
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.redistribute.agreement import agree, most
from pcomm.ntp.redistribute.planned_moves import (
    Move,
    OwnedState,
    check_same_job,
    lacking,
    moves,
)
from pcomm.ntp.redistribute.spread_tensors import SpreadTensor, spread_tensors

__all__ = ["Moved", "redistribute"]


# Bytes that a rank sends, and gets, in one round at most.
_ROUND_BYTES = 64 << 20


@dataclass(frozen=True)
class Moved:
    """Bytes of state that one rank sent and got.

    Args:
        bytes_sent: Bytes sent to other ranks.
        bytes_received: Bytes got from other ranks.
        bytes_least: Bytes of the units that it needed and did not hold: no scheme sends it fewer.
        rounds: Number of messages between a pair of ranks at most; equal on all ranks.
    """

    bytes_sent: int
    bytes_received: int
    bytes_least: int
    rounds: int


def redistribute(
    old: NtpPlan,
    new: NtpPlan,
    group: Group,
    *,
    rank: int,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    param_layouts: Mapping[str, ParamLayout],
    holders: Collection[int],
    owned: OwnedState | None = None,
    device: torch.device | None = None,
    round_bytes: int = _ROUND_BYTES,
) -> Moved:
    """Fill `target`, this rank's state under the new plan, from what ranks have under the old one.

    Collective over `group`: ranks that are idle or new call it, too, with no tensors on the side
    where they have none. `source` is only read, so after a failure in the middle it can be begun
    again with other plans; `target` is then partly filled, and its rank is no holder of `new`.

    A tensor may be the same object on both sides where the rank's units stay the same; it is
    neither written nor copied.

    Args:
        old: Plan under which `source` lies; the same on all ranks, newcomers included.
        new: Plan under which `target` lies, of the same topology and units.
        group: All ranks of the new generation, with their global ranks.
        rank: Global rank of this process.
        source: State tensors by name, as `state_tensors` names them; empty without state.
        target: State tensors by the same names, to be filled; empty if the rank is idle.
        param_layouts: Layouts of the parameters of this rank's new model, or of its old one where
            it has no new one; from `param_layouts_of`. The dimension is taken from them.
        holders: Ranks that are alive and have the state of `old`.
        owned: Owners of the optimizer's state under both plans; by default every rank that holds
            the weights has it. Tensors of the state are then those of the units that a rank owns,
            section by section and in each of them range by range.
        device: Device on which ranks agree, for a rank without tensors; that of its tensors, or
            the CPU, by default.
        round_bytes: Bytes that a rank sends, and gets, in one round: memory beside the two states.
            A single position of a dimension is not cut.

    Returns:
        The bytes of this rank, beside the fewest that it could get.

    Raises:
        StateLostError: No holder has some units; on every rank.
        ConfigError: Plans of different jobs, missing names, a split parameter without units.
        LayoutError: A tensor whose shape or data type is not what the plans say, or one memory on
            both sides where the rank's units change.
        TopologyError: A group without some rank of the new plan, or without a holder.
        PeerError: Another rank found one of these errors.
        DivergenceError: Ranks passed different plans or holders, or tensors of different names,
            data types or shapes. All errors are raised on all ranks, before state is sent.
    """
    where = device or next(
        (x.device for x in chain(source.values(), target.values())), torch.device("cpu")
    )
    tensors: list[SpreadTensor] = []
    found, error, facts = Transfers({}, {}, 0), None, _plan_facts(old, new, holders)
    if owned is not None:
        stage = new.topology.coordinates(rank).get("pp", 0)
        told = [owned.old.digest(), owned.new.digest(), str(sorted(owned.whole))]
        facts[f"owners of stage {stage}"] = told
    try:
        check_same_job(old, new)
        _check_group(new, group, rank, holders)
        tensors = spread_tensors(old, new, rank, source, target, param_layouts, holders, owned)
        found = planned_transfers(old, new, rank, group.ranks, tensors, holders, owned)
        if tensors:
            stage = new.topology.coordinates(rank).get("pp", 0)
            facts[f"tensors of stage {stage}"] = [one.agreed() for one in tensors]
    except Exception as caught:
        error = caught
    agree(group.collectives, group.ranks, facts, error, where)
    # Parameters themselves may be passed.
    with torch.no_grad():
        for one in tensors:
            _copy_own(one)
        return _exchanged(group, found, where, round_bytes)


def _plan_facts(old: NtpPlan, new: NtpPlan, holders: Collection[int]) -> dict[str, list[str]]:
    return {
        "old plan": old.agreed_lines(),
        "new plan": new.agreed_lines(),
        "holders": [str(sorted(holders))],
    }


def _check_group(new: NtpPlan, group: Group, rank: int, holders: Collection[int]) -> None:
    needed = {r for r in new.topology.ranks if r not in new.topology.failed}
    missing = sorted((needed | set(holders)) - set(group.ranks))
    if missing or rank != group.ranks[group.rank]:
        raise TopologyError(
            f"redistribute: rank {rank} in a group of ranks {list(group.ranks)}",
            found=f"no rank {missing[0]}"
            if missing
            else f"this process is rank {group.ranks[group.rank]} there",
            why="All ranks that live under the new plan take part, and all holders are among them.",
            fix="Pass a group of all ranks of the new generation, and only living holders.",
        )


class SplittableBoxes(NamedTuple):
    """Boxes of tensors with the dimension along which they may be cut."""

    boxes: list[Tensor]
    dim: int


class Transfers(NamedTuple):
    """What this rank sends and gets, by the place of the peer in the group.

    Attributes:
        sent: Boxes for each peer, in an order that both know.
        received: Boxes from each peer, in the same order.
        least_bytes: Bytes of the units that this rank needs and does not hold.
    """

    sent: dict[int, list[SplittableBoxes]]
    received: dict[int, list[SplittableBoxes]]
    least_bytes: int


def planned_transfers(
    old: NtpPlan,
    new: NtpPlan,
    rank: int,
    ranks: Sequence[int],
    tensors: Iterable[SpreadTensor],
    holders: Collection[int],
    owned: OwnedState | None = None,
) -> Transfers:
    """What a rank sends and gets, from plans and its tensors. Local.

    Raises:
        StateLostError: No rank holds some units.
    """
    place = {one: i for i, one in enumerate(ranks)}
    stage = new.topology.coordinates(rank).get("pp", 0)
    known: dict[tuple[str, bool], tuple[Move, ...]] = {}
    found = Transfers({}, {}, 0)
    least = 0
    for one in tensors:
        is_state = one.name.startswith("optimizer.")
        key = one.parameter, is_state
        if key not in known and owned is not None and owned.covers(one.parameter):
            known[key] = owned.moves(
                old, new, one.parameter, is_state=is_state, holders=holders, stage=stage
            )
        elif key not in known:
            known[key] = moves(old, new, one.parameter, holders=holders, stage=stage)
        if one.target is not None:
            missed = lacking(one.target.held, () if one.source is None else one.source.newest)
            least += sum(stop - start for start, stop in missed) * one.unit_bytes()
        for move in known[key]:
            interval = move.start, move.stop
            if move.source == rank:
                assert one.source is not None
                boxes = SplittableBoxes(list(one.boxes(one.source, interval)), one.dim)
                found.sent.setdefault(place[move.target], []).append(boxes)
            elif move.target == rank:
                assert one.target is not None
                boxes = SplittableBoxes(list(one.boxes(one.target, interval)), one.dim)
                found.received.setdefault(place[move.source], []).append(boxes)
    return found._replace(least_bytes=least)


def _copy_own(one: SpreadTensor) -> None:
    """Copy what this rank holds under both plans."""
    source, target = one.source, one.target
    if source is None or target is None or source.tensor is target.tensor:
        return
    if source.tensor.data_ptr() == target.tensor.data_ptr():
        return
    for first, last in source.newest:
        for start, stop in target.held:
            own = max(first, start), min(last, stop)
            if own[0] < own[1]:
                pairs = zip(one.boxes(source, own), one.boxes(target, own), strict=True)
                for before, after in pairs:
                    after.copy_(before)


def _exchanged(group: Group, found: Transfers, device: torch.device, round_bytes: int) -> Moved:
    collectives = group.collectives
    peers = most(collectives, max(len(found.sent), len(found.received)), device)
    if not peers:
        return Moved(0, 0, found.least_bytes, 0)
    share = max(1, round_bytes // peers)
    sent = {peer: in_rounds(own, share) for peer, own in found.sent.items()}
    received = {peer: in_rounds(own, share) for peer, own in found.received.items()}
    longest = max((len(own) for own in chain(sent.values(), received.values())), default=0)
    rounds = most(collectives, longest, device)
    total = [0, 0]
    for number in range(rounds):
        leaving = [_round(sent.get(i), number) for i in range(group.size)]
        coming = [_round(received.get(i), number) for i in range(group.size)]
        send_sizes, receive_sizes = ([_bytes(own) for own in side] for side in (leaving, coming))
        # Parcels lie in the order of the peers already: the plan of this exchange is its sizes.
        plan = RowMoves(tuple(send_sizes), tuple(receive_sizes), None, None)
        data = plan.move(packed(chain.from_iterable(leaving), device), collectives)
        unpack(data, chain.from_iterable(coming))
        total[0] += sum(send_sizes)
        total[1] += sum(receive_sizes)
    return Moved(total[0], total[1], found.least_bytes, rounds)


def _round(rounds: list[list[Tensor]] | None, number: int) -> list[Tensor]:
    return rounds[number] if rounds is not None and number < len(rounds) else []


def _bytes(views: list[Tensor]) -> int:
    return sum(view.numel() * view.element_size() for view in views)


def in_rounds(chunks: Iterable[SplittableBoxes], most_bytes: int) -> list[list[Tensor]]:
    """Views of the boxes, cut and dealt out so that no round has more than `most_bytes`.

    One position of a box is not cut, whatever its size. Both ends of a message cut it alike.
    """
    rounds: list[list[Tensor]] = []
    left = 0
    for boxes, dim in chunks:
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
