"""A step of a job that has lost a rank, beside a step of the whole job with the same global batch.

Ranks share the cores of this machine, so that wall time does not show how long the busiest rank
computes. Each rank counts the processor time of its process, with the threads of its communicators;
the busiest rank of the smaller job is compared with that of the whole one, and with the share of
the work that the plan gives it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core_bench.rows import Row, row
from core_bench.runner import Timing, take_turns
from ntp_bench.small_model import (
    LAYERS_ROLE,
    StackModel,
    rows_of_replica,
    stack_units,
    tensor_specs,
)
from pcomm.core.collectives import SpyCollectives
from pcomm.core.control import Control
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.process.local_ranks import LocalRanks
from pcomm.core.topology import Topology
from pcomm.ntp.planning.failures import Coord, Failures
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.session import Session, TrainState
from pcomm.ntp.sync.grad_groups import Strategy, grad_groups
from pcomm.ntp.sync.grad_sync import GradSync

_FOREVER = 10**9


class SharedStore:
    """A store of all ranks of torch.distributed, on rank 0. Collective to make.

    Groups of one process have names by their store, so a session beside other groups shares theirs.
    """

    def __init__(self) -> None:
        self._host: dist.TCPStore | None = None
        port = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            self._host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port += self._host.port
        dist.broadcast(port, 0)
        self._port = int(port)

    def connect(self) -> dist.Store:
        """A new connection. Local."""
        return dist.TCPStore("127.0.0.1", self._port, is_master=False)


BY_HAND = "whole, one all-reduce by hand"
"""The baseline: gradients of a replica in one buffer, summed over the replicas at the end."""

WHOLE = "whole"
"""The whole job with `GradSync`."""

SESSION = "whole, in a session"
"""The whole job whose ranks could be lost: with the norm of all gradients, and a vote."""

CASES: dict[str, tuple[bool, Strategy | None]] = {
    BY_HAND: (False, None),
    WHOLE: (False, "interval"),
    SESSION: (False, "interval"),
    "one rank lost": (True, "interval"),
    "one rank lost, gather-core": (True, "gather-core"),
}
"""For each case: whether a rank is lost, and how gradients are summed."""

SIZES = {"2 x TP2": (2, 504), "2 x TP4": (4, 504)}
"""Tensor-parallel degree and rows of the global batch, which all shares divide."""

_WIDTH, _LAYERS = 512, 4


@dataclass(frozen=True)
class StepTimes:
    """What one case took on one rank.

    Args:
        wall_us: Microseconds of each round, from a barrier to the end of the step; none on a rank
            that is not in the job.
        core_us: Processor microseconds of the process in each round.
        sent_bytes: Bytes of the operands that the rank gave to sums of gradients in a step.
        calls: Number of the operations of those sums.
    """

    wall_us: tuple[float, ...]
    core_us: tuple[float, ...]
    sent_bytes: int
    calls: int


def jobs(tp: int, width: int = _WIDTH) -> tuple[NtpPlan, NtpPlan]:
    """The plans of the whole job, of two replicas, and of the one without its last rank."""
    units = stack_units(width)
    topology = Topology({"dp": 2, "tp": tp})
    lost = Failures.at(Coord(dp=1, tp=tp - 1))
    return plan(topology, Failures(), units), plan(topology, lost, units)


def busiest_share(whole: NtpPlan, smaller: NtpPlan, rows: int) -> Fraction:
    """Work of the busiest rank of `smaller` over that of `whole`, with the same global batch.

    Args:
        whole: Plan without a failure.
        smaller: Plan after failures.
        rows: Rows of the global batch.
    """

    def busiest(made: NtpPlan) -> int:
        return max(
            share * max(made.layout("*.up.weight", replica).sizes)
            for replica, share in enumerate(made.token_shares(rows))
        )

    return Fraction(busiest(smaller), busiest(whole))


def time_steps(tp: int, rows: int, rounds: int) -> dict[str, list[StepTimes]]:
    """Times of all cases by rank, taken in turns. Starts ranks of its own.

    Args:
        tp: Tensor-parallel degree of the whole job, which has two replicas.
        rows: Rows of the global batch.
        rounds: Number of rounds.
    """
    with LocalRanks(2 * tp, imports_main=False) as ranks:
        found: list[dict[str, StepTimes]] = ranks.run(steps_of_rank, (tp, rows, rounds))
    return {case: [one[case] for one in found] for case in CASES}


def steps_of_rank(tp: int, rows: int, rounds: int, width: int = _WIDTH) -> dict[str, StepTimes]:
    """All cases on this rank, in turns. Collective over `2 * tp` ranks of torch.distributed.

    Args:
        tp: Tensor-parallel degree of the whole job.
        rows: Rows of the global batch.
        rounds: Number of rounds that count, after two others.
        width: Size of a row.
    """
    rank = dist.get_rank()
    store, opened = SharedStore(), list[Groups]()
    steps: dict[str, Callable[[], None]] = {}
    spies: dict[str, list[SpyCollectives]] = {}
    for case, (is_lost, strategy) in CASES.items():
        made = jobs(tp, width)[is_lost]
        if rank in made.topology.failed:
            continue
        spies[case] = []
        if case == SESSION:
            ending, steps[case] = _session_step(store, made, rank, width, rows)
            continue
        groups = open_spied(store, made, strategy, spies[case])
        opened.append(groups)
        steps[case] = _step(made, groups, rank, width, rows, strategy)
    sent: dict[str, tuple[int, int]] = dict.fromkeys(CASES, (0, 0))

    def turn(case: str) -> dict[str, float]:
        dist.barrier()
        if case not in steps:
            return {}
        for spy in spies[case]:
            spy.clear()
        begin, busy = time.perf_counter(), time.process_time()
        steps[case]()
        ended = time.perf_counter() - begin, time.process_time() - busy
        used = spies[case]
        sent[case] = sum(s.sent_bytes for s in used), sum(len(s.calls) for s in used)
        return {f"{case}: wall": ended[0] * 1e6, f"{case}: core": ended[1] * 1e6}

    # The first round of these does not count either.
    found = take_turns({case: partial(turn, case) for case in CASES}, rounds + 1)
    ending()
    for groups in reversed(opened):
        groups.close()
    dist.barrier()

    def times(name: str) -> tuple[float, ...]:
        return found[name].rounds_us[1:] if name in found else ()

    return {
        case: StepTimes(times(f"{case}: wall"), times(f"{case}: core"), *sent[case])
        for case in CASES
    }


def open_spied(
    store: SharedStore, made: NtpPlan, strategy: Strategy | None, spies: list[SpyCollectives]
) -> Groups:
    """Groups of a job; `spies` gets one of each group that sums gradients."""

    def spied(group: Group) -> SpyCollectives:
        spy = SpyCollectives(group.collectives)
        if group.role != LAYERS_ROLE:
            spies.append(spy)
        return spy

    return open_groups(
        made.topology,
        [*tensor_specs(made), *grad_groups(made, strategy or "interval")],
        control=Control(store.connect(), _ranks_of(made), dist.get_rank()),
        collectives=spied,
    )


def _ranks_of(made: NtpPlan) -> list[int]:
    return [rank for rank in made.topology.ranks if rank not in made.topology.failed]


def _step(
    made: NtpPlan, groups: Groups, rank: int, width: int, rows: int, strategy: Strategy | None
) -> Callable[[], None]:
    tensor = next(one for one in groups.values() if one.role == LAYERS_ROLE and rank in one.ranks)
    model = StackModel(made, tensor.collectives, rank, width=width, layers=_LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_of, weight = loss_of_rank(made, rank, width, rows)

    def loss() -> Tensor:
        return loss_of(model)

    if strategy is None:
        peers = next(
            group for group in groups.values() if group.role != LAYERS_ROLE and group.size == 2
        )
        parameters = list(model.parameters())

        def by_hand() -> None:
            (loss() * weight).backward()
            gradients = [one.grad for one in parameters if one.grad is not None]
            flat = torch.cat([one.flatten() for one in gradients])
            peers.collectives.all_reduce(flat, out=flat)
            torch._foreach_copy_(
                gradients,
                [
                    piece.view_as(one)
                    for piece, one in zip(
                        flat.split([one.numel() for one in gradients]), gradients, strict=True
                    )
                ],
            )
            optimizer.step()
            optimizer.zero_grad()

        return by_hand
    sync = GradSync(made, model, groups, rank=rank, strategy=strategy)

    def step() -> None:
        with sync.accumulate(weight=weight):
            loss().backward()
        sync.finish()
        optimizer.step()
        sync.zero_grad()

    return step


def _session_step(
    store: SharedStore, made: NtpPlan, rank: int, width: int, rows: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What ends a session, and what takes a step in it."""

    def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        model = StackModel(plan, groups["tp"].collectives, rank, width=width, layers=_LAYERS)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    session = Session(store.connect, made.topology, dict(made.units), build, rank=rank)
    return session.close, step_of(session, loss_of_rank(made, rank, width, rows))


def step_of(
    session: Session, of_rank: tuple[Callable[[nn.Module], Tensor], float]
) -> Callable[[], None]:
    """A step of an endless session: the loss of this rank's rows with its weight, and a commit."""
    attempts, (loss, weight) = session.attempts(until=_FOREVER), of_rank

    def step() -> None:
        with next(attempts) as attempt:
            attempt.backward(loss(session.model), weight=weight)
            attempt.commit()

    return step


def loss_of_rank(
    made: NtpPlan, rank: int, width: int, rows: int
) -> tuple[Callable[[nn.Module], Tensor], float]:
    """The loss of this rank's rows, and their share of the global batch."""
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    own = batch[rows_of_replica(made.token_shares(rows), made.place(rank).replica)]

    def loss(model: nn.Module) -> Tensor:
        found: Tensor = model(own).square().mean()
        return found

    return loss, len(own) / rows


OVER_SHARE = "x the faster whole job's busiest rank, over the share of work"
"""Unit of the ratio that has a goal, 1.03."""


def step_rows(found: Mapping[str, Sequence[StepTimes]], share: Fraction, place: str) -> list[Row]:
    """Rows of one size: times beside the whole job, and bytes.

    Args:
        found: Times of each case by rank.
        share: Work of the busiest rank of the smaller job over that of the whole one.
        place: Words for the size.
    """
    used = {case: [one for one in ranks if one.wall_us] for case, ranks in found.items()}
    rows = []

    def add(
        case: str, value: float, unit: str, ratio: float | None = None, rounds: int = 1
    ) -> None:
        beside = None if ratio is None else (f"{WHOLE} @ {place}", ratio)
        rows.append(row("ntp step", f"{case} @ {place}", value, unit, rounds, beside=beside))

    busiest = {case: _busiest(case, ranks) for case, ranks in used.items()}
    for unit, timings in {
        "ms, wall": {case: slowest(case, ranks) for case, ranks in used.items()},
        "ms of a core, busiest rank": busiest,
        "ms of cores, all ranks": {case: together(case, ranks) for case, ranks in used.items()},
    }.items():
        for case, timing in timings.items():
            ratio = None if case == WHOLE else timing.ratio_to(timings[WHOLE])
            add(case, timing.median_us / 1e3, unit, ratio, len(timing.rounds_us))
    baseline = min((busiest[case] for case in (BY_HAND, WHOLE)), key=lambda one: one.median_us)
    for case, timing in busiest.items():
        if case not in (BY_HAND, WHOLE, SESSION):
            over = timing.ratio_to(baseline) / float(share)
            add(case, over, OVER_SHARE, rounds=len(timing.rounds_us))
    add("share of work", float(share), "x the busiest rank's of the whole job")
    for case, ranks in used.items():
        if case == SESSION:  # its groups are its own
            continue
        sent = max(one.sent_bytes for one in ranks) / 2**20
        add(case, sent, "MiB sent in sums")
        add(case, max(one.calls for one in ranks), "sums a rank")
    return rows


def slowest(case: str, ranks: Sequence[StepTimes]) -> Timing:
    return _timing(case, [max(one) for one in zip(*(r.wall_us for r in ranks), strict=True)])


def _busiest(case: str, ranks: Sequence[StepTimes]) -> Timing:
    """Of the rank with the most processor time over all rounds, so that noise is not picked."""
    busiest = max(ranks, key=lambda one: statistics.median(one.core_us))
    return _timing(case, busiest.core_us)


def together(case: str, ranks: Sequence[StepTimes]) -> Timing:
    return _timing(case, [sum(one) for one in zip(*(r.core_us for r in ranks), strict=True)])


def _timing(case: str, times_us: Sequence[float]) -> Timing:
    return Timing(case, tuple(times_us))
