"""Random models with experts and replicas in virtual time: no deadlock, bytes, and mutations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_support.schedules import chain, chain_costs, plan_of, step_of
from pcomm.core.errors import ConfigError, DivergenceError
from pcomm.core.groups.group import Group
from pcomm.core.simulate.deadlock import DeadlockError, check_issue_order
from pcomm.core.simulate.engine import simulate
from pcomm.core.simulate.program import Algorithm, Cluster, Rail, SimulatedCommunicator, Task
from pcomm.fsdp.compute_costs import Costs, program
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import Schedule, UnitEvent
from pcomm.fsdp.settings import ReshardPolicy, Roles

# R replicas, E expert-data-parallel ranks, P expert-parallel ranks; a rank is (r E + e) P + p.
AXES = ("rep", "edp", "ep")
RATE = 1e3
SHARDS = (
    ReshardPolicy.zero3(),
    ReshardPolicy.zero3(reduce="step"),
    ReshardPolicy.zero2(),
    ReshardPolicy.zero1(),
)

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ranks:
    """All ranks, and which groups the dense and the expert parameters have.

    Args:
        sizes: R, E, P.
        replicates: Whether the dense scope, and the expert one, is sharded within a replica and
            summed over replicas; if not, it is sharded over both.
        separate: Whether the scope reduces on a communicator of its own.
    """

    sizes: tuple[int, int, int]
    replicates: tuple[bool, bool] = (True, True)
    separate: tuple[bool, bool] = (True, True)

    @property
    def count(self) -> int:
        return self.sizes[0] * self.sizes[1] * self.sizes[2]

    def partition(self, *fixed: str) -> Partition:
        """Groups of the ranks that agree on these coordinates."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*map(range, self.sizes))):
            key = tuple(at for axis, at in zip(AXES, place, strict=True) if axis in fixed)
            groups.setdefault(key, []).append(rank)
        return tuple(map(tuple, groups.values()))

    def partitions(self) -> dict[str, Partition]:
        """Groups of each queue."""
        dense = self.partition(*(["rep"] if self.replicates[0] else []))
        expert = self.partition("ep", *(["rep"] if self.replicates[1] else []))
        summed = self.partition("edp", "ep")
        return {
            "dp:gather": dense,
            "dp:reduce": dense,
            "rep": summed,
            "expert:gather": expert,
            "expert:reduce": expert,
            "expert_rep": summed,
        }

    def roles(self) -> tuple[Roles, Roles]:
        """Groups of the first rank, which all others have in the same shape."""
        of = {queue: groups[0] for queue, groups in self.partitions().items()}

        def roles(name: str, rep: str, replicates: bool, separate: bool) -> Roles:
            gather = Group(name, of[f"{name}:gather"], None, role="gather")
            reduce = Group(name, of[f"{name}:reduce"], None, role="reduce")
            has_replicas = replicates and self.sizes[0] > 1
            return Roles(
                gather,
                reduce if separate else gather,
                Group(rep, of[rep], None) if has_replicas else None,
            )

        return (
            roles("dp", "rep", self.replicates[0], self.separate[0]),
            roles("expert", "expert_rep", self.replicates[1], self.separate[1]),
        )

    def cluster(self, rail_of: dict[str, int], algorithm: Algorithm = "ring") -> Cluster:
        return Cluster(
            [Rail(f"rail{n}", RATE) for n in range(3)],
            [
                SimulatedCommunicator(queue, f"rail{rail_of.get(queue, 0)}", groups, algorithm)
                for queue, groups in self.partitions().items()
            ],
        )


@dataclass(frozen=True)
class Case:
    """A step of a model on a cluster."""

    ranks: Ranks
    cluster: Cluster
    plans: list[GroupPlan]
    schedules: list[Schedule]
    programs: dict[int, tuple[Task, ...]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Blocks with dense parameters, some with experts in them or beside them; one slow rank."""
    ranks = Ranks(
        draw(st.sampled_from([(2, 2, 2), (3, 1, 2), (1, 2, 2), (2, 3, 1), (2, 1, 1), (4, 2, 4)])),
        draw(st.tuples(st.booleans(), st.booleans())),
        draw(st.tuples(st.booleans(), st.booleans())),
    )
    dense, expert = ranks.roles()
    shards = [draw(st.sampled_from(SHARDS)) for _ in range(2)]
    forward, backward, plans = [UnitEvent("use", ROOT, "forward")], [], []
    elements = st.sampled_from([1, 300, 960])
    for number in range(draw(st.integers(1, 4))):
        name = f"b{number}"
        inner = [f"{name}.experts"] if draw(st.booleans()) else []
        # Experts are a unit of their own within the block, or parameters of the block.
        owner = inner[0] if inner else name
        plans.append(plan_of(name, dense, elements=draw(elements), reshard=shards[0]))
        if draw(st.booleans()):
            plans.append(
                plan_of(owner, expert, scope="expert", elements=draw(elements), reshard=shards[1])
            )
        units = [name, *inner]
        forward += [UnitEvent("use", unit, "forward") for unit in units]
        forward += [UnitEvent("done", unit, "forward") for unit in reversed(units)]
        ended = [UnitEvent("use", unit, "backward") for unit in units]
        ended += [UnitEvent("done", unit, "backward") for unit in reversed(units)]
        backward = ended + backward
    events = [
        *forward,
        UnitEvent("done", ROOT, "forward"),
        UnitEvent("use", ROOT, "backward"),
        *backward,
    ]
    events += [UnitEvent("done", ROOT, "backward"), UnitEvent("end", ROOT, "backward")]
    schedules = step_of(
        events,
        draw(st.permutations(plans)),
        micro_batches=draw(st.integers(1, 2)),
        prefetch=draw(st.integers(0, 3)),
        inflight=draw(st.integers(1, 3)),
    )
    seconds = st.sampled_from([0.0, 0.5, 3.0])
    names = sorted({event.unit for event in events})
    costs = Costs({n: draw(seconds) for n in names}, {n: draw(seconds) for n in names})
    tasks = tuple(program(schedules, plans, costs))
    slow = tuple(replace(task, seconds=4 * task.seconds) for task in tasks)
    programs = dict.fromkeys(range(ranks.count), tasks)
    programs[draw(st.integers(0, ranks.count - 1))] = slow
    rail_of = {queue: draw(st.integers(0, 2)) for queue in ranks.partitions()}
    algorithm: Algorithm = draw(st.sampled_from(["ring", "direct"]))
    return Case(ranks, ranks.cluster(rail_of, algorithm), plans, schedules, programs)


def sent_by_formula(case: Case) -> dict[str, float]:
    """Bytes that a rank sends in a step on each queue, from sizes of groups and lengths alone."""
    sent: Counter[str] = Counter()
    for plan in case.plans:
        size, whole = plan.gather.size, 4 * plan.layout.length
        moved = (size - 1) / size * whole
        replicas = 1 if plan.replicate is None else plan.replicate.size
        for step in (step for s in case.schedules for step in s.steps if step.name == plan.name):
            name = plan.gather.name
            if step.kind == "gather":
                sent[f"{name}:gather"] += moved
            elif step.kind == "reduce":
                sent[f"{name}:{plan.reduce.role}"] += moved
            elif step.kind == "all_reduce":
                rep = "rep" if name == "dp" else "expert_rep"
                sent[rep] += 2 * (replicas - 1) / replicas * whole / size
    return {queue: num_bytes for queue, num_bytes in sent.items() if num_bytes}


@given(cases())
@settings(max_examples=60)
def test_models_with_experts_and_replicas_run_without_deadlock(case: Case) -> None:
    check_issue_order(case.programs, case.cluster)
    timeline = simulate(case.programs, case.cluster)
    expected = sent_by_formula(case)
    for rank in (0, case.ranks.count - 1):
        sent: Counter[str] = Counter()
        for event in timeline.events(rank):
            if event.is_communication:
                sent[event.queue] += event.bytes
        # Each event is rounded to whole bytes.
        rounding = 0.5 * len(case.programs[rank])
        assert dict(sent) == pytest.approx(expected, abs=rounding)
    # A shard is summed over replicas when it has been reduced.
    sizes = {plan.name: plan.gather.size for plan in case.plans}
    for task in case.programs[0]:
        if task.kind == "all_reduce":
            name = without_number(task.name).removeprefix("backward all_reduce ")
            before = [t for t in task.after if without_number(t) == f"backward reduce {name}"]
            assert len(before) == (sizes[name] > 1)
            stops = [timeline.time(one).stop_s for one in before]
            assert timeline.time(task.name).start_s >= max(stops, default=0.0)


def without_number(name: str) -> str:
    """The second of a name has ` (2)` behind it."""
    return name.partition(" (")[0]


@given(cases(), st.data())
@settings(max_examples=60)
def test_a_rank_that_swaps_two_collectives_of_a_queue_is_found(
    case: Case, data: st.DataObject
) -> None:
    """The mutation that the test above must be able to see: any rank, any neighbours."""
    rank = data.draw(st.integers(0, case.ranks.count - 1))
    tasks = list(case.programs[rank])
    queues: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        if task.is_collective:
            queues.setdefault(task.queue, []).append(place)
    neighbours = [pair for places in queues.values() for pair in pairwise(places)]
    if not neighbours:
        return
    one, other = data.draw(st.sampled_from(neighbours))
    tasks[one], tasks[other] = tasks[other], tasks[one]
    with pytest.raises(DeadlockError) as caught:
        simulate({**case.programs, rank: tuple(tasks)}, case.cluster)
    assert repr(tasks[one].name) in str(caught.value)


def blocks_with_experts(plans: list[GroupPlan], prefetch: int = 1) -> tuple[Task, ...]:
    schedules = step_of(chain(3), plans, prefetch=prefetch)
    return tuple(program(schedules, plans, chain_costs(3, 1.0, 2.0)))


@pytest.mark.parametrize("separate", [True, False])
def test_a_rank_that_gathers_further_ahead_hangs(separate: bool) -> None:
    """It keeps more units from forward to backward, so it lacks gathers that the others issue."""
    ranks = Ranks((2, 2, 2), separate=(separate, separate))
    dense, expert = ranks.roles()
    plans = [plan_of(f"b{i}", dense) for i in range(3)]
    plans += [plan_of(f"b{i}", expert, scope="expert") for i in range(3)]
    programs = dict.fromkeys(range(8), blocks_with_experts(plans, prefetch=0))
    simulate(programs, ranks.cluster({}))
    programs[5] = blocks_with_experts(plans, prefetch=1)
    with pytest.raises(DeadlockError, match="rank 5"):
        simulate(programs, ranks.cluster({}))


def test_a_rank_with_its_experts_first_is_found_by_the_order_of_issue() -> None:
    """Each queue has one order everywhere; a device that runs one collective at a time hangs."""
    ranks = Ranks((2, 2, 2))
    dense, expert = ranks.roles()
    plans = [plan_of(f"b{i}", dense) for i in range(3)]
    experts = [plan_of(f"b{i}", expert, scope="expert") for i in range(3)]
    programs = dict.fromkeys(range(8), blocks_with_experts(plans + experts))
    check_issue_order(programs, ranks.cluster({}))
    programs[5] = blocks_with_experts(experts + plans)
    simulate(programs, ranks.cluster({}))
    with pytest.raises(DivergenceError, match="rank 5"):
        check_issue_order(programs, ranks.cluster({}))


def test_each_scope_is_predicted_for_its_own_number_of_ranks() -> None:
    dense, expert = Ranks((2, 2, 2)).roles()
    plans = [plan_of("b0", dense), plan_of("b0", expert, scope="expert")]
    schedules, costs = step_of(chain(1), plans), chain_costs(1, 1.0, 2.0)
    with pytest.raises(ConfigError, match="2 scopes: '', 'expert'"):
        program(schedules, plans, costs, num_shards=64)

    def shares(num_shards: dict[str, int]) -> dict[str, float]:
        tasks = program(schedules, plans, costs, num_shards=num_shards)
        return {task.queue: task.num_bytes for task in tasks if task.kind == "all_gather"}

    # 640 fp32 numbers each.
    assert shares({"": 64, "expert": 16}) == {"dp:gather": 40.0, "expert:gather": 160.0}
    assert shares({"": 64}) == {"dp:gather": 40.0, "expert:gather": 2560 / expert.gather.size}
    assert shares({"": 64, "expert": 1}) == {"dp:gather": 40.0}
