"""A step of a job that has lost a rank, beside a step of the whole job with the same global batch.

Ranks share the cores of this machine, so that wall time does not show how long the busiest rank
computes. Each rank counts the processor time of its process, with the threads of its communicators;
the busiest rank of the smaller job is compared with that of the whole one, and with the share of
the work that the plan gives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pcomm.core.collectives import SpyCollectives
from pcomm.core.control import Control
from pcomm.core.groups.group import Group
from pcomm.core.groups.groups import Groups, open_groups
from pcomm.core.process.local_ranks import LocalRanks
from pcomm.core.topology import Topology
from pcomm.ntp.bench.session_step import SessionSteps, SharedStore
from pcomm.ntp.bench.small_model import (
    LAYERS_ROLE,
    StackModel,
    rows_of_replica,
    stack_units,
    tensor_specs,
)
from pcomm.ntp.planning.failures import Coord, Failures
from pcomm.ntp.planning.plan import Plan, plan
from pcomm.ntp.session import Built
from pcomm.ntp.sync.grad_groups import Strategy, grad_groups
from pcomm.ntp.sync.grad_sync import GradSync

__all__ = [
    "BY_HAND",
    "CASES",
    "SESSION",
    "SIZES",
    "WHOLE",
    "StepTimes",
    "busiest_share",
    "jobs",
    "steps_of_rank",
    "time_steps",
]

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
        wall_s: Seconds of each round, from a barrier to the end of the step; none on a rank that
            is not in the job.
        core_s: Processor seconds of the process in each round.
        sent_bytes: Bytes of the operands that the rank gave to sums of gradients in a step.
        calls: Number of the operations of those sums.
    """

    wall_s: tuple[float, ...]
    core_s: tuple[float, ...]
    sent_bytes: int
    calls: int


def jobs(tp: int, width: int = _WIDTH) -> tuple[Plan, Plan]:
    """The plans of the whole job, of two replicas, and of the one without its last rank."""
    units = stack_units(width)
    topology = Topology({"dp": 2, "tp": tp})
    lost = Failures.at(Coord(dp=1, tp=tp - 1))
    return plan(topology, Failures(), units), plan(topology, lost, units)


def busiest_share(whole: Plan, smaller: Plan, rows: int) -> Fraction:
    """Work of the busiest rank of `smaller` over that of `whole`, with the same global batch.

    Args:
        whole: Plan without a failure.
        smaller: Plan after failures.
        rows: Rows of the global batch.
    """

    def busiest(made: Plan) -> int:
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
        groups = _open(store, made, strategy, spies[case])
        opened.append(groups)
        steps[case] = _step(made, groups, rank, width, rows, strategy)
    wall: dict[str, list[float]] = {case: [] for case in CASES}
    core: dict[str, list[float]] = {case: [] for case in CASES}
    sent: dict[str, tuple[int, int]] = dict.fromkeys(CASES, (0, 0))
    for turn in range(rounds + 2):
        for case in CASES:
            dist.barrier()
            if case in steps:
                for spy in spies[case]:
                    spy.clear()
                begin, busy = time.perf_counter(), time.process_time()
                steps[case]()
                ended = time.perf_counter() - begin, time.process_time() - busy
                used = spies[case]
                sent[case] = sum(s.sent_bytes for s in used), sum(len(s.calls) for s in used)
                if turn >= 2:
                    wall[case].append(ended[0])
                    core[case].append(ended[1])
    ending()
    for groups in reversed(opened):
        groups.close()
    dist.barrier()
    return {case: StepTimes(tuple(wall[case]), tuple(core[case]), *sent[case]) for case in CASES}


def _open(
    store: SharedStore, made: Plan, strategy: Strategy | None, spies: list[SpyCollectives]
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


def _ranks_of(made: Plan) -> list[int]:
    return [rank for rank in made.topology.ranks if rank not in made.topology.failed]


def _step(
    made: Plan, groups: Groups, rank: int, width: int, rows: int, strategy: Strategy | None
) -> Callable[[], None]:
    tensor = next(one for one in groups.values() if one.role == LAYERS_ROLE and rank in one.ranks)
    model = StackModel(made, tensor.collectives, rank, width=width, layers=_LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_of, weight = _loss(made, rank, width, rows)

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
    store: SharedStore, made: Plan, rank: int, width: int, rows: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What ends a session, and what takes a step in it."""

    def build(plan: Plan, groups: Groups, rank: int) -> Built:
        model = StackModel(plan, groups["tp"].collectives, rank, width=width, layers=_LAYERS)
        return Built(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    steps = SessionSteps(store, made.topology, dict(made.units), build)
    loss, weight = _loss(made, rank, width, rows)
    return steps.close, lambda: steps.step(loss, weight)


def _loss(
    made: Plan, rank: int, width: int, rows: int
) -> tuple[Callable[[nn.Module], Tensor], float]:
    """The loss of this rank's rows, and their share of the global batch."""
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    own = batch[rows_of_replica(made.token_shares(rows), made.place(rank).replica)]

    def loss(model: nn.Module) -> Tensor:
        found: Tensor = model(own).square().mean()
        return found

    return loss, len(own) / rows
