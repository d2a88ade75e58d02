"""The shortest time that a schedule can take on given links.

Follow the steps with buffers without end and gathers that begin at once. Gathers stand in a line of
their own, reduces in another, sums over replicas in a third, and computing in a fourth:

    wait_gather  computing goes on when all gathers up to that one are through
    reduce       begins when what comes before it is computed, and the reduces before it are through
    all_reduce   the same, after its reduce

What ends last ends no earlier with any prefetch or number of buffers, since all of them only add
things to wait for. If all bytes pass one link, the sum of all collectives is a bound too. For equal
units this is the formula in `pcomm.fsdp.bench.bounds`, which a test holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.core.simulate.cluster import Rail
from pcomm.fsdp.analysis.simulated import Costs, compute_segments
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.runtime.schedule import Schedule, Step

__all__ = ["Limits", "limits_of", "sent_bytes"]


@dataclass(frozen=True)
class Limits:
    """Least seconds of a step.

    Args:
        one_link_s: Seconds with one link for all bytes of a rank.
        independent_s: Seconds with a link for gathers, one for reduces and one for sums over
            replicas.
    """

    one_link_s: float
    independent_s: float


def sent_bytes(step: Step, plan: GroupPlan) -> float:
    """Least bytes that this rank sends in a step of its schedule; 0 if it sends nothing."""
    if step.kind == "gather":
        return plan.gather_bytes
    if step.kind == "reduce":
        return plan.reduce_bytes
    if step.kind == "all_reduce":
        replicas = plan.num_replicas
        return 2 * (replicas - 1) / replicas * plan.layout.shard_length * plan.main_dtype.itemsize
    return 0


def limits_of(
    schedules: Sequence[Schedule],
    plans: Sequence[GroupPlan],
    link: Rail,
    costs: Costs | None = None,
) -> Limits:
    """The bounds of a step. Local.

    Args:
        schedules: The schedule of each micro-batch of the step, in order.
        plans: Plans of all parameter groups.
        link: A rank's link; each collective that sends takes its latency once.
        costs: Seconds of computing; None for none, which makes bounds of communication alone.
    """
    by_name = {plan.name: plan for plan in plans}
    now = gathers = reduces = replicas = total = 0.0
    gathered: dict[str, float] = {}
    reduced: dict[str, float] = {}
    settled: dict[str, float] = {}
    for schedule in schedules:
        seconds = compute_segments(schedule, costs) if costs else {}
        for place, step in enumerate(schedule.steps):
            if step.is_anchor:
                now += seconds.get(place, 0.0)
                continue
            num_bytes = sent_bytes(step, by_name[step.name])
            takes = num_bytes / link.bytes_per_s
            # Of collectives on one link, latencies may overlap; bytes do not.
            total += takes
            takes += link.latency_s if num_bytes else 0.0
            if step.kind == "gather":
                gathers += takes
                gathered[step.name] = gathers
            elif step.kind == "wait_gather":
                now = max(now, gathered[step.name])
            elif step.kind == "reduce":
                reduces = max(reduces, now) + takes
                reduced[step.name] = reduces
            elif step.kind == "all_reduce":
                replicas = max(replicas, reduced[step.name]) + takes
                settled[step.name] = replicas
    independent = max(now, reduces, replicas)
    return Limits(max(independent, total), independent)
