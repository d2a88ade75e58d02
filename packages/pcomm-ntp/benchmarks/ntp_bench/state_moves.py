"""A state of parameters and moments on its way from one plan to another, and the bytes that takes.

Two moves are timed: a rank of a job of two replicas is lost, and comes back without state. The
baseline is one all-to-all of as many bytes between the same ranks, out of and into buffers that are
in order already: no agreement, no packing, no copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from core_bench.rows import Row, row
from core_bench.runner import Timing, take_turns
from ntp_bench.small_model import stack_units
from pcomm.core.control import default_control
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.process.local_ranks import LocalRanks
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.core.topology import Topology
from pcomm.ntp.planning.failures import Coord, Failures
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.redistribute import Moved, moves, redistribute

MOVES = ("a rank is lost", "a rank comes back")
"""The two changes that are timed."""

_TP, _WIDTH = 4, 512
_MIB = 2**20
_KINDS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
_ITEM = 4


@dataclass(frozen=True)
class MoveTimes:
    """One change on one rank.

    Args:
        moved: Bytes of a round; None on a rank that takes no part.
        ours_us: Microseconds of each round.
        bare_us: Microseconds of each round of the baseline.
        is_right: True where the tensors had the right values at the end.
    """

    moved: Moved | None
    ours_us: tuple[float, ...]
    bare_us: tuple[float, ...]
    is_right: bool


def state_mib_of(layers: int) -> int:
    """MiB of parameters and moments of a replica with this number of blocks."""
    return layers * 8 * _WIDTH**2 * _ITEM * len(_KINDS) // _MIB


def layers_of(state_mib: int) -> int:
    """Number of blocks whose state is nearest to this size, at least one."""
    return max(1, round(state_mib / state_mib_of(1)))


def shapes_of(layers: int) -> dict[str, tuple[tuple[int, int], int]]:
    """Shape of each whole parameter, and the dimension that is split, by name."""
    found = {}
    for number in range(layers):
        found[f"{number}.up.weight"] = (4 * _WIDTH, _WIDTH), 0
        found[f"{number}.down.weight"] = (_WIDTH, 4 * _WIDTH), 1
    return found


def bytes_between(
    old: NtpPlan, new: NtpPlan, layers: int, holders: tuple[int, ...]
) -> dict[tuple[int, int], int]:
    """Bytes by source and target of one change, as planned."""
    found: dict[tuple[int, int], int] = {}
    for name, (shape, dim) in shapes_of(layers).items():
        of_unit = shape[1 - dim] * _ITEM * len(_KINDS)
        for move in moves(old, new, name, holders=holders):
            pair = move.source, move.target
            found[pair] = found.get(pair, 0) + (move.stop - move.start) * of_unit
    return found


def time_moves(state_mib: int, rounds: int) -> dict[str, list[MoveTimes]]:
    """Times and bytes of both changes by rank. Starts ranks of its own.

    Args:
        state_mib: MiB of parameters and moments of a replica.
        rounds: Number of rounds.
    """
    with LocalRanks(2 * _TP, imports_main=False) as ranks:
        args = layers_of(state_mib), rounds, _TP
        found: list[dict[str, MoveTimes]] = ranks.run(moves_of_rank, args)
    return {name: [one[name] for one in found] for name in MOVES}


def moves_of_rank(layers: int, rounds: int, tp: int) -> dict[str, MoveTimes]:
    """Both changes on this rank. Collective over `2 * tp` ranks of torch.distributed.

    Args:
        layers: Number of blocks.
        rounds: Number of rounds.
        tp: Tensor-parallel degree of the whole job.
    """
    rank, units = dist.get_rank(), stack_units(_WIDTH)
    topology = Topology({"dp": 2, "tp": tp})
    whole = plan(topology, Failures(), units)
    smaller = plan(topology, Failures.at(Coord(dp=1, tp=tp - 1)), units)
    left = tuple(range(2 * tp - 1))
    found = {}
    for name, (old, new) in zip(MOVES, ((whole, smaller), (smaller, whole)), strict=True):
        members = left if new is smaller else tuple(range(2 * tp))
        if rank not in members:
            for _ in range(2 * (rounds + 1)):
                dist.barrier()
            found[name] = MoveTimes(None, (), (), True)
            continue
        with open_groups(
            new.topology, [GroupSpec.of_ranks(members, "all")], control=default_control(members)
        ) as groups:
            found[name] = _time(old, new, groups["all"], rank, layers, rounds, left)
    return found


def _time(
    old: NtpPlan,
    new: NtpPlan,
    group: Group,
    rank: int,
    layers: int,
    rounds: int,
    holders: tuple[int, ...],
) -> MoveTimes:
    source = dict(_state(old, rank, layers)) if rank in holders else {}
    wanted = dict(_state(new, rank, layers))
    target = {name: torch.full_like(one, torch.nan) for name, one in wanted.items()}
    layouts: Mapping[str, ParamLayout] = {
        name: ParamLayout(new.layout(name, new.place(rank).replica), dim)
        for name, (_, dim) in shapes_of(layers).items()
    }

    def ours() -> Moved:
        return redistribute(
            old,
            new,
            group,
            rank=rank,
            source=source,
            target=target,
            param_layouts=layouts,
            holders=holders,
        )

    bare = _bare(bytes_between(old, new, layers, holders), group, rank)
    moved: list[Moved] = []

    def turn(run: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        answer = run()
        ended = time.perf_counter()
        moved.extend([answer] if isinstance(answer, Moved) else [])
        return (ended - begin) * 1e6

    found = take_turns({"ours": lambda: turn(ours), "bare": lambda: turn(bare)}, rounds)
    is_right = all(torch.equal(target[name], one) for name, one in wanted.items())
    return MoveTimes(moved[-1], found["ours"].rounds_us, found["bare"].rounds_us, is_right)


def _state(made: NtpPlan, rank: int, layers: int) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors; each row or column has a number that tells its unit and tensor."""
    place = made.place(rank)
    for number, (name, (shape, dim)) in enumerate(shapes_of(layers).items()):
        own = made.layout(name, place.replica).positions(place.index)
        for offset, kind in enumerate(_KINDS):
            values = torch.tensor(own, dtype=torch.float32) + number * 8 + offset * 0.25
            view = values[:, None] if dim == 0 else values
            size = (len(own), shape[1]) if dim == 0 else (shape[0], len(own))
            yield f"{kind}{name}", view.expand(size).contiguous()


def _bare(between: Mapping[tuple[int, int], int], group: Group, rank: int) -> Callable[[], object]:
    send = [between.get((rank, other), 0) for other in group.ranks]
    receive = [between.get((other, rank), 0) for other in group.ranks]
    x = torch.zeros(sum(send), dtype=torch.uint8)
    out = torch.zeros(sum(receive), dtype=torch.uint8)

    def run() -> object:
        return group.collectives.all_to_all(x, send_sizes=send, receive_sizes=receive, out=out)

    return run


_OURS, _BARE = "reshard", "one all-to-all of the bytes"


def move_rows(found: Mapping[str, Sequence[MoveTimes]], state_mib: int) -> list[Row]:
    """Time, bytes, and bytes over the fewest of each change.

    Args:
        found: Times of each change by rank.
        state_mib: MiB of the state of a replica.
    """
    rows = []
    for change, ranks in found.items():
        place = f"{change}, {state_mib} MiB a replica"
        taking = [one for one in ranks if one.moved is not None]
        ours = _slowest(_OURS, taking, lambda one: one.ours_us)
        bare = _slowest(_BARE, taking, lambda one: one.bare_us)
        number, beside = len(ours.rounds_us), f"{_BARE} @ {place}"
        got = sum(one.moved.bytes_received for one in taking if one.moved is not None)
        least = sum(one.moved.bytes_least for one in taking if one.moved is not None)
        wrong = float(sum(not one.is_right for one in taking))
        name, case = "ntp reshard", f"{_OURS} @ {place}"
        ratio = (beside, ours.ratio_to(bare))
        rows += [
            row(name, beside, bare.median_us / 1e3, "ms", number),
            row(name, case, ours.median_us / 1e3, "ms", number, beside=ratio),
            row(name, case, got / 2**20, "MiB received by all ranks"),
            row(name, case, got / least, "bytes over the fewest"),
            row(name, case, wrong, "ranks with a wrong value"),
        ]
    return rows


def _slowest(
    case: str, ranks: Sequence[MoveTimes], times: Callable[[MoveTimes], Sequence[float]]
) -> Timing:
    rounds = zip(*(times(one) for one in ranks), strict=True)
    return Timing(case, tuple(max(one) for one in rounds))
