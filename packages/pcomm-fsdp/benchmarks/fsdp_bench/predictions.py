"""The time that a step should take: bounds on given links, and predictions of the simulator.

**Bounds.** Each rank sends and receives the same amount, on links that carry so much each way. A
ring, or an all-to-all and a local sum, moves the least: of a unit of P bytes each of N ranks sends
(N - 1) / N * P to gather it, and as much to reduce its gradients. With

    G_f, G_b, R    time of all gathers in forward, of those in backward, and of all reduces
    C_f, C_b       time of all computation in forward and in backward
    g, r, c_f, c_b of one unit

no computation goes before the first gather, no reduce before the first computation of backward, and
nothing else is left to do during the last reduce; backward gathers go before the backward of the
unit that is last. So on links of their own for gathers and reduces

    F = max(g + C_f, G_f + c_f)              forward, and nothing of backward but gathers before
    B = max(C_b + r, c_b + R)                backward after that
    T >= max(F + B, G_f + G_b + c_b + r)

and on one link, which all bytes have to pass,

    T >= max(the same, G_f + G_b + R).

Headers are not counted, so no rank reaches these times; computation is that of the fastest round.

**Predictions.** Times of steps in the simulator, from figures of the same run:

    computing  of each unit on each rank: medians of some steps of one case, waits left out
    bytes      at the rate of a link; each group has the link of its interface
    latency    of a collective: what one takes alone beyond its bytes, headers included

So a case is predicted from its schedule and its groups; how long it takes is not known to the
model. What the ranks do beside computing and sending, such as copies in and out of buffers, is in
the latency as far as collectives alone do it too, and nowhere else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.simulate.engine import simulate
from pcomm.core.simulate.program import Cluster, Rail, SimulatedCommunicator
from pcomm.core.trace.recording import Recorder
from pcomm.fsdp.compute_costs import Costs, compute_segments, program, queues_of
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.runtime.schedule import Schedule
from pcomm.fsdp.sharded import Sharded


@dataclass(frozen=True)
class StepWork:
    """The least work of a step.

    Args:
        unit_bytes: Bytes of the parameters of each unit; gradients have as many.
        num_ranks: Ranks among which units are sharded.
        num_backward_gathers: Units that are gathered again in backward, the first ones.
        forward_s: Computation of forward, in seconds.
        backward_s: Computation of backward.
    """

    unit_bytes: Sequence[int]
    num_ranks: int
    num_backward_gathers: int
    forward_s: float
    backward_s: float

    def gather_bytes(self) -> float:
        """Bytes that each rank sends to gather, in forward and in backward."""
        again = self.unit_bytes[: self.num_backward_gathers]
        return self._share * (sum(self.unit_bytes) + sum(again))

    def reduce_bytes(self) -> float:
        """Bytes that each rank sends to reduce."""
        return self._share * sum(self.unit_bytes)

    @property
    def _share(self) -> float:
        return (self.num_ranks - 1) / self.num_ranks


def lower_bounds_s(step: StepWork, bytes_per_s: float) -> tuple[float, float]:
    """Seconds on one link, and on one for gathers and another for reduces; see above."""
    share = (step.num_ranks - 1) / step.num_ranks / bytes_per_s
    depth = len(step.unit_bytes)
    forward_gathers = share * sum(step.unit_bytes)
    backward_gathers = step.gather_bytes() / bytes_per_s - forward_gathers
    reduces = step.reduce_bytes() / bytes_per_s
    unit_forward, unit_backward = step.forward_s / depth, step.backward_s / depth
    first_gather = last_reduce = share * step.unit_bytes[0]
    forward = max(first_gather + step.forward_s, forward_gathers + unit_forward)
    backward = max(step.backward_s + last_reduce, unit_backward + reduces)
    gathers = forward_gathers + backward_gathers + unit_backward + last_reduce
    independent = max(forward + backward, gathers)
    return max(independent, forward_gathers + backward_gathers + reduces), independent


@dataclass(frozen=True)
class Prediction:
    """Times in a model, never a measurement.

    Args:
        latency_s: Seconds of latency of one collective in the model.
        computing_s: Seconds of computing in a step, in the model, on the rank with the most.
        steps_s: Seconds of a step of each case.
    """

    latency_s: float
    computing_s: float
    steps_s: Mapping[str, float]


def predict(
    cases: Mapping[str, Sharded],
    costs: Sequence[Costs],
    *,
    bytes_per_s: float,
    latency_s: float,
) -> Prediction:
    """A step of each case, if units compute what `costs` say. Local.

    Args:
        cases: Models with a recorded schedule; all of them have the same units.
        costs: Costs of each rank.
        bytes_per_s: Rate of each link, each way.
        latency_s: Seconds of latency of each collective.
    """
    steps_s = {}
    computing_s = 0.0
    for case, sharded in cases.items():
        schedules = sharded.schedules()
        cluster = cluster_of(sharded.plans, bytes_per_s, latency_s)
        steps_s[case] = step_s(schedules, sharded.plans, costs, cluster)
        computing_s = max(
            computing_s,
            *(sum(sum(compute_segments(s, own).values()) for s in schedules) for own in costs),
        )
    return Prediction(latency_s, computing_s, steps_s)


def step_s(
    schedules: Sequence[Schedule],
    plans: Sequence[GroupPlan],
    costs: Sequence[Costs],
    cluster: Cluster,
) -> float:
    """Seconds until the last rank has done its step in virtual time. Local.

    Args:
        schedules: The schedule of each micro-batch.
        plans: Plans of all parameter groups.
        costs: Costs of each rank; all ranks have the same schedules.
        cluster: Links, and what runs on them.
    """
    programs = {rank: program(schedules, plans, own) for rank, own in enumerate(costs)}
    return simulate(programs, cluster).makespan_s


def cluster_of(plans: Sequence[GroupPlan], bytes_per_s: float, latency_s: float) -> Cluster:
    """The links and communicators of these plans. Local.

    A rank has a link for each interface that a group was opened with. An operation has its latency
    once, however many steps its algorithm has, since that is how it was measured.

    Args:
        plans: Plans of all parameter groups; groups without an interface share one link.
        bytes_per_s: Rate of each link, each way.
        latency_s: Seconds of latency of each collective.
    """
    queues = queues_of(plans)
    communicators: dict[str, SimulatedCommunicator] = {}
    for plan in plans:
        for group in (plan.gather, plan.reduce):
            rail = str(group.granted.get("interface", "any"))
            queue = queues[group.key]
            communicators[queue] = SimulatedCommunicator(queue, rail, (group.ranks,), "direct")
    rails = dict.fromkeys(communicator.rail for communicator in communicators.values())
    return Cluster(
        [Rail(name, bytes_per_s, latency_s) for name in rails], list(communicators.values())
    )


def latency_of(
    alone_s: float, *, num_bytes: float, num_operations: int, bytes_per_s: float
) -> float:
    """Seconds that a collective takes beside its bytes, not below 0. Local.

    Args:
        alone_s: Seconds of all operations, one after another with nothing beside them.
        num_bytes: Bytes that a rank sends in all of them.
        num_operations: Number of operations.
        bytes_per_s: Rate of the link, each way.
    """
    return max(0.0, alone_s - num_bytes / bytes_per_s) / num_operations


def recorded_costs(
    sharded: Sharded, step: Callable[[], object], num_steps: int, control: Collectives
) -> list[Costs]:
    """Seconds of the units on each rank, the medians of some steps. Collective.

    Where ranks share cores they slow each other down; that is a part of the costs.

    Args:
        sharded: A model with a recorded schedule.
        step: Does one step of it.
        num_steps: Number of steps.
        control: Collectives that exchange the costs.
    """
    found = []
    for _ in range(num_steps):
        recorder = Recorder(control.rank)
        with sharded.recording(recorder):
            step()
        schedule = sharded.schedule
        assert schedule is not None
        found.append(Costs.from_events(recorder.events, schedule, 1))
    return costs_of_ranks(median_costs(found), control)


def median_costs(steps: Sequence[Costs]) -> Costs:
    """The median of each unit's seconds over steps with the same units. Local."""

    def median(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {unit: statistics.median(one[unit] for one in each) for unit in each[0]}

    return Costs(median([s.forward_s for s in steps]), median([s.backward_s for s in steps]))


def costs_of_ranks(own: Costs, control: Collectives) -> list[Costs]:
    """The costs of all ranks, which have the same units. Collective."""
    forward, backward = sorted(own.forward_s), sorted(own.backward_s)
    seconds = [
        *(own.forward_s[unit] for unit in forward),
        *(own.backward_s[unit] for unit in backward),
    ]
    found = control.all_gather(torch.tensor(seconds, dtype=torch.float64))
    return [
        Costs(
            dict(zip(forward, row[: len(forward)], strict=True)),
            dict(zip(backward, row[len(forward) :], strict=True)),
        )
        for row in found.view(control.size, -1).tolist()
    ]
