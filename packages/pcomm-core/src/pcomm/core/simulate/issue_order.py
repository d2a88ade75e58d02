"""Checks that ranks issue operations on several communicators in one order.

NCCL asks for it: operations on communicators of one device may exclude each other there, so two
ranks that submit them in opposite orders can wait for each other for ever, although each queue by
itself has the same order everywhere. Source: NCCL user guide, "Using multiple NCCL communicators
concurrently".
"""

from __future__ import annotations

from collections import deque

from pcomm.core.errors import DivergenceError
from pcomm.core.simulate.cluster import Cluster
from pcomm.core.simulate.deadlock import rank_text
from pcomm.core.simulate.rank_classes import SimulatedJob, classify
from pcomm.core.simulate.task import Programs

__all__ = ["check_issue_order"]

Head = tuple[int, str, str]
"""A collective, and the queue and name of its task."""


def check_issue_order(programs: Programs, cluster: Cluster) -> None:
    """Prove that one order of all collectives fits every rank, whatever queues they are on.

    Every device is assumed to run one collective at a time, in the order of its program. If all
    collectives can run so, no timing can make them wait for each other. Local.

    Args:
        programs: Tasks by rank, in the order in which the host issues them.
        cluster: Rails and communicators.

    Raises:
        DivergenceError: There is no such order; names the first pair and the ranks.
        ConfigError, TopologyError: As `simulate`.
    """
    job = classify(programs, cluster, collapse=True)
    orders = [
        [
            (m, t.queue, t.name)
            for m, t in zip(a.collectives, a.program.tasks, strict=True)
            if m >= 0
        ]
        for a in job.classes
    ]
    done = [0] * len(orders)
    present = [0] * len(job.collectives)
    todo = deque(range(len(orders)))
    while todo:
        rank_class = todo.popleft()
        if done[rank_class] == len(orders[rank_class]):
            continue
        collective = orders[rank_class][done[rank_class]][0]
        members = job.collectives[collective].members
        present[collective] += 1
        if present[collective] == len(members):
            for member in members:
                done[member] += 1
            todo.extend(members)
    left = [order[count:] for order, count in zip(orders, done, strict=True)]
    if any(left):
        raise _error(job, left)


def _error(job: SimulatedJob, left: list[list[Head]]) -> DivergenceError:
    ranks = [rank_text(rank_class.ranks) for rank_class in job.classes]
    rank_class = next(a for a, order in enumerate(left) if order)
    head = left[rank_class][0]
    # Every collective at a head lacks a member that is held by another: following them from rank
    # to rank ends at one that never comes, or comes back.
    seen: list[tuple[int, Head]] = []
    found = ""
    while not found:
        seen.append((rank_class, head))
        members = job.collectives[head[0]].members
        other = next(a for a in members if not left[a] or left[a][0] != head)
        if members[other] is None:
            found = f"{_text(head)} is in the program of {ranks[rank_class]}, not of {ranks[other]}"
        elif head in left[other] and left[other][0] in left[rank_class]:
            theirs = left[other][0]
            found = (
                f"{_text(head)} comes before {_text(theirs)} on {ranks[rank_class]}, "
                f"after it on {ranks[other]}"
            )
        else:
            rank_class, head = other, left[other][0]
            places = [place for place, (a, _) in enumerate(seen) if a == rank_class]
            if places:
                chain = ", ".join(f"{_text(h)} on {ranks[a]}" for a, h in seen[places[0] :])
                found = f"no two ranks differ, but each of these waits for the next: {chain}"
    return DivergenceError(
        "check_issue_order",
        found=found,
        why="Operations on several communicators of one device must be submitted in the same order "
        "on every rank, or the ranks can wait for each other for ever.",
        fix="Build the programs of all ranks from one schedule, and issue it in its order.",
    )


def _text(head: Head) -> str:
    return f"{head[2]!r} on {head[1]!r}"
