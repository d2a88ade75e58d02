"""Steps with owners of the optimizer's state beside steps where every replica has all of it.

Steps are timed in a `Session`, in turns. What a rank sends in one is counted, in sums of gradients
and in the weights that owners send; the norm and the vote of a step are some hundred bytes. What
moves after a death is counted from plans alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from core_bench.rows import Row, row
from core_bench.runner import take_turns
from ntp_bench.small_model import StackModel, stack_units
from ntp_bench.steps import (
    SharedStore,
    StepTimes,
    loss_of_rank,
    open_spied,
    slowest,
    step_of,
    together,
)
from pcomm.core.collectives import SpyCollectives
from pcomm.core.groups.open_groups import Groups
from pcomm.core.process.local_ranks import LocalRanks
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.core.topology import Topology
from pcomm.ntp.planning.degrees import Policy
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.hosts import Hosts
from pcomm.ntp.planning.owners import Owners, UnitSizes, holding_groups
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.redistribute.planned_moves import OwnedState
from pcomm.ntp.session import Session, TrainState
from pcomm.ntp.sync.grad_groups import group_names
from pcomm.ntp.sync.grad_sync import GradSync
from pcomm.ntp.sync.owned_params import OwnedParams, unit_sizes

ALL = "state on every replica"
"""The baseline."""

CASES: dict[str, int | None] = {ALL: None, "1 copy": 1, "2 copies": 2}
"""Number of owners of each unit, as `Session` takes it."""

REPLICAS = (2, 4)
"""Numbers of replicas, of one rank each."""

MOVING = ((4, 1), (4, 2), (4, 4))
"""Replicas and tensor-parallel degree of jobs with two copies of which a rank dies."""

_WIDTH, _LAYERS, _ROWS = 512, 4, 64
_MIB = 2**20


@dataclass(frozen=True)
class CopyCosts:
    """What a case costs on one rank.

    Args:
        times: Times of the steps, and bytes sent in one.
        owned: Elements whose state the rank has.
        to_owners_bytes: Bytes that it would send if gradients were summed for owners alone.
    """

    times: StepTimes
    owned: int
    to_owners_bytes: int


def time_copies(rounds: int) -> dict[int, dict[str, list[CopyCosts]]]:
    """Costs of all cases by number of replicas and rank. Starts ranks of its own.

    Args:
        rounds: Number of rounds.
    """
    made: dict[int, dict[str, list[CopyCosts]]] = {}
    for dp in REPLICAS:
        with LocalRanks(dp, imports_main=False) as ranks:
            found: list[dict[str, CopyCosts]] = ranks.run(copies_of_rank, (rounds,))
        made[dp] = {case: [one[case] for one in found] for case in CASES}
    return made


def copies_of_rank(rounds: int, width: int = _WIDTH) -> dict[str, CopyCosts]:
    """All cases on this rank, in turns. Collective over the ranks of torch.distributed.

    Args:
        rounds: Number of rounds that count, after two others.
        width: Size of a row.
    """
    store, rank = SharedStore(), dist.get_rank()
    topology = Topology({"dp": dist.get_world_size(), "tp": 1})
    made = plan(topology, Failures(), stack_units(width))
    counted = {case: _counted(store, made, rank, width, one) for case, one in CASES.items()}
    sessions = {case: _session(store, made, rank, width, one) for case, one in CASES.items()}

    def turn(case: str) -> dict[str, float]:
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        sessions[case][1]()
        ended = time.perf_counter() - begin, time.process_time() - busy
        return {f"{case}: wall": ended[0] * 1e6, f"{case}: core": ended[1] * 1e6}

    # The first round of these does not count either.
    found = take_turns({case: partial(turn, case) for case in CASES}, rounds + 1)
    for close, _ in sessions.values():
        close()
    # Rank 0 has the store.
    dist.barrier()
    return {
        case: CopyCosts(
            StepTimes(
                found[f"{case}: wall"].rounds_us[1:],
                found[f"{case}: core"].rounds_us[1:],
                *counted[case][:2],
            ),
            *counted[case][2:],
        )
        for case in CASES
    }


def _session(
    store: SharedStore, made: NtpPlan, rank: int, width: int, copies: int | None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What ends a session, and what takes a step in it."""

    def connect() -> dist.Store:
        # Sessions of one store would be one job.
        return dist.PrefixStore(f"copies {copies}", store.connect())

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = StackModel(plan, groups["tp"].collectives, rank, width=width, layers=_LAYERS)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    units = dict(made.units)
    session = Session(connect, made.topology, units, build, rank=rank, copies=copies)
    return session.close, step_of(session, loss_of_rank(made, rank, width, _ROWS))


def _counted(
    store: SharedStore, made: NtpPlan, rank: int, width: int, copies: int | None
) -> tuple[int, int, int, int]:
    """Bytes and operations of a step, owned elements, and bytes of sums for owners alone."""
    spies: list[SpyCollectives] = []
    with open_spied(store, made, "interval", spies) as groups:
        tensor = next(
            one for one in groups.values() if one.name.startswith("tensor") and rank in one.ranks
        )
        model = StackModel(made, tensor.collectives, rank, width=width, layers=_LAYERS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        owned, to_owners = None, 0
        if copies is not None:
            layouts = param_layouts_of(model)
            sizes = unit_sizes(made, model, optimizer, layouts)
            owners = Owners.deal(made, rank, sizes, Hosts.of(made.topology, copies))
            owned = OwnedParams(made, rank, model, optimizer, layouts, owners)
            to_owners = 4 * sent_to_owners(made, owners, rank)
        sync = GradSync(made, model, groups, rank=rank)
        loss, weight = loss_of_rank(made, rank, width, _ROWS)
        for spy in spies:
            spy.clear()
        with sync.accumulate(weight=weight):
            loss(model).backward()
        sync.finish()
        sums = sum(spy.sent_bytes for spy in spies)
        names = group_names(made, "interval")
        if owned is not None:
            owned.step()
            owned.gather_weights(lambda ranks: groups[names[ranks]])
        sent = sum(spy.sent_bytes for spy in spies)
        calls = sum(len(spy.calls) for spy in spies)
        elements = sum(one.numel() for one in model.parameters())
        if owned is None:
            return sent, calls, elements, sums
        return sent, calls, owned.num_elements, to_owners + sent - sums


def sent_to_owners(made: NtpPlan, owners: Owners, rank: int) -> int:
    """Elements that a rank sends if each sum is made by one owner, who passes it on to the others.

    Args:
        made: Plan of the job.
        owners: Owners under it.
        rank: Global rank.
    """
    sent = 0
    for name, size in owners.sizes.items():
        for first, last, ranks in holding_groups(made, rank, size):
            if rank not in ranks:
                continue
            for start, stop, sender in owners.senders[name]:
                if first <= start and stop <= last:
                    others = _num_owners(owners, name, start) - 1
                    sent += (stop - start) * size.size * (others if sender == rank else 1)
    return sent


def _num_owners(owners: Owners, name: str, unit: int) -> int:
    return next(len(one.owners) for one in owners.ranges[name] if one.start <= unit < one.stop)


def moved_over_fewest(dp: int, tp: int, width: int = _WIDTH) -> float:
    """State that moves after the death of a rank, over the least that any choice of owners moves.

    Each unit gets two owners among the ranks that hold it then. The largest over all ranks.

    Args:
        dp: Number of replicas, each on a host of its own.
        tp: Tensor-parallel degree of the whole job.
        width: Size of a row.
    """
    units = stack_units(width)
    topology = Topology({"dp": dp, "tp": tp})
    policy, hosts = Policy(drops_replicas=True), Hosts.of(topology, 2)
    whole = plan(topology, Failures(), units, policy)
    sizes = {
        f"{block}{name[1:]}": UnitSizes(name, 4 * width, width)
        for block in range(_LAYERS)
        for name in units
    }
    before, ratios = Owners.deal(whole, 0, sizes, hosts), []
    for gone in topology.ranks:
        left = [rank for rank in topology.ranks if rank != gone]
        made = plan(topology, Failures.from_global_ranks([gone]), units, policy)
        after = Owners.deal(made, left[0], sizes, hosts, before=before, alive=left)
        state = OwnedState(before, after, left)
        moved = sum(
            (one.stop - one.start) * size.size
            for name, size in sizes.items()
            for one in state.moves(whole, made, name, is_state=True, holders=left, stage=0)
        )
        least = sum(
            size.size * (2 - len({owner for owner in own if owner in ranks}))
            for name, size in sizes.items()
            for first, last, ranks in holding_groups(made, left[0], size)
            for own in _owners_of_units(before, name, first, last)
        )
        ratios.append(moved / least)
    return max(ratios)


def _owners_of_units(owners: Owners, name: str, first: int, last: int) -> Iterator[tuple[int, ...]]:
    for one in owners.ranges[name]:
        for _ in range(max(first, one.start), min(last, one.stop)):
            yield one.owners


def copy_rows(found: Mapping[int, Mapping[str, Sequence[CopyCosts]]]) -> list[Row]:
    """Times beside the baseline, bytes, state, and what moves after a death.

    Args:
        found: Costs by number of replicas, case and rank.
    """
    rows = []
    for dp, cases in found.items():
        place = f"{dp} x TP1"
        for unit, timing in (("ms, wall", slowest), ("ms of cores, all ranks", together)):
            times = {case: timing(case, [o.times for o in own]) for case, own in cases.items()}
            for case, one in times.items():
                beside = None if case == ALL else (f"{ALL} @ {place}", one.ratio_to(times[ALL]))
                value, number = one.median_us / 1e3, len(one.rounds_us)
                rows.append(
                    row("ntp copies", f"{case} @ {place}", value, unit, number, beside=beside)
                )
        for case, own in cases.items():
            sent = max(one.times.sent_bytes for one in own) / _MIB
            owners = max(one.to_owners_bytes for one in own) / _MIB
            state = max(one.owned for one in own) * 8 / _MIB
            name = f"{case} @ {place}"
            rows.append(row("ntp copies", name, sent, "MiB sent by a rank in a step"))
            rows.append(row("ntp copies", name, state, "MiB of averages on a rank"))
            if case != ALL:
                unit = "MiB it would send with sums for owners alone"
                rows.append(row("ntp copies", name, owners, unit))
    for dp, tp in MOVING:
        place = f"2 copies, any rank dies @ {dp} x TP{tp}"
        unit = "state that moves over the fewest"
        rows.append(row("ntp copies", place, moved_over_fewest(dp, tp), unit))
    return rows
