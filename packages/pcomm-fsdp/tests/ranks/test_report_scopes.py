"""Bytes of a report and of a program with experts, by scope, beside a spy and a formula."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from fsdp_support.trainings import MICRO_BATCHES, Block, SmallModel, accumulated_step
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.simulate.program import loads
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.compute_costs import Costs, program, queues_of
from pcomm.fsdp.report import ROLES, ideal_bytes, sent_bytes
from pcomm.fsdp.settings import ReshardPolicy, Roles, Scope
from pcomm.fsdp.sharded import Sharded

SCOPES = ("", "expert")


def is_expert(name: str, _parameter: nn.Parameter) -> bool:
    """Which weights play the part; bytes do not depend on what they compute."""
    return ".up." in name


def roles_of(groups: Groups, name: str) -> Roles:
    rep = groups["expert.rep" if name == "expert.edp" else "rep"]
    return Roles(groups[name, "gather"], groups[name, "reduce"], rep)


def formula(elements: int, size: int, replicas: int, reshard: ReshardPolicy) -> dict[str, float]:
    """fp32 bytes of one rank: (N-1)/N P to gather or reduce, 2 (M-1)/M P/N to sum."""
    moved = 4 * elements * (size - 1) / size
    # All gathers of a step, of which the last units of a micro-batch save some in backward.
    gathers = 2 * MICRO_BATCHES if reshard.keep == "use" else 1
    reduces = MICRO_BATCHES if reshard.reduce == "micro_batch" else 1
    return {
        "gather": gathers * moved,
        "reduce": reduces * moved,
        "replicate": 2 * (replicas - 1) / replicas * 4 * elements / size,
    }


Seen = dict[tuple[str, str], int]
"""Bytes that a spy counted, by scope and role."""


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@pytest.mark.parametrize(("rep", "edp", "ep"), [(1, 2, 2), (1, 1, 4), (2, 1, 2), (2, 2, 1)])
@ranks(4)
def test_bytes_of_each_scope_are_those_of_its_own_groups(
    rank: int, rep: int, edp: int, ep: int, strategy: str
) -> None:
    """Ranks on each axis, 4 in all; the dense scope is sharded over `dp` = edp x ep."""
    topology = Topology({"rep": rep, "dp": edp * ep}, order=("dp", "rep")).view(
        "expert", {"rep": rep, "edp": edp, "ep": ep}, order=("ep", "edp", "rep")
    )
    names = [(name, role) for name in ("dp", "expert.edp") for role in ("gather", "reduce")]
    # The scopes differ in what they keep, too.
    kept = (ReshardPolicy.zero3(), ReshardPolicy.zero1())
    shards = dict(zip(SCOPES, kept if strategy == "zero3" else reversed(kept), strict=True))
    with open_groups(topology, [*names, "rep", "expert.rep", "expert.ep"]) as groups:
        roles = dict(zip(SCOPES, (roles_of(groups, n) for n in ("dp", "expert.edp")), strict=True))
        model = SmallModel()
        experts = Scope(
            is_expert, roles["expert"], reshard=shards["expert"], spread=groups["expert.ep"]
        )
        sharded = fully_shard(
            model, roles[""], units=[Block], scopes={"expert": experts}, reshard=shards[""]
        )
        accumulated_step(model, sharded)
        sharded.parameters_changed()
        spies = {}
        for scope, own in roles.items():
            for role, group in by_role(own).items():
                spies[scope, role] = group.collectives = SpyCollectives(group.collectives)
        accumulated_step(model, sharded)
        seen = {key: spy.sent_bytes for key, spy in spies.items()}
        assert seen["", "gather"] > 0 < seen["", "reduce"]
        assert (seen["expert", "gather"] > 0) == (edp > 1)
        assert (seen["expert", "replicate"] > 0) == (rep > 1)
        check_report(sharded, roles, shards, seen, rep)
        check_program(sharded, roles, seen)


def by_role(roles: Roles) -> dict[str, Group]:
    assert roles.replicate is not None
    return dict(zip(ROLES, (roles.gather, roles.reduce, roles.replicate), strict=True))


def check_report(
    sharded: Sharded,
    roles: dict[str, Roles],
    shards: dict[str, ReshardPolicy],
    seen: Seen,
    replicas: int,
) -> None:
    """A scope's plans beside the spies of its groups and the formula; the report is their sum."""
    report = sharded.report(micro_batches=MICRO_BATCHES)
    assert report.sent == {role: sum(seen[scope, role] for scope in SCOPES) for role in ROLES}
    total: Counter[str] = Counter()
    steps = [step for schedule in sharded.schedules(MICRO_BATCHES) for step in schedule.steps]
    for scope in SCOPES:
        plans = {plan.name: plan for plan in sharded.plans if plan.scope == scope}
        whole = SmallModel().named_parameters()
        elements = sum(p.numel() for n, p in whole if is_expert(n, p) == bool(scope))
        expected = formula(elements, roles[scope].gather.size, replicas, shards[scope])
        assert ideal_bytes(list(plans.values()), MICRO_BATCHES) == pytest.approx(expected)
        total.update(expected)
        padding = sum(plan.layout.length for plan in plans.values()) / elements
        for role in ROLES:
            kind = "all_reduce" if role == "replicate" else role
            own = [step for step in steps if step.kind == kind and step.name in plans]
            counted = sum(sent_bytes(step, plans[step.name]) for step in own)
            assert counted == seen[scope, role]
            least = 0.5 if role == "gather" and shards[scope].keep == "use" else 1.0
            assert least * expected[role] <= counted <= padding * expected[role]
    assert report.ideal == pytest.approx(dict(total))


def check_program(sharded: Sharded, roles: dict[str, Roles], seen: Seen) -> None:
    """The program puts the same bytes on the queue of each of those groups."""
    schedules = sharded.schedules(MICRO_BATCHES)
    units = {s.name for schedule in schedules for s in schedule.steps if s.kind == "use"}
    costs = Costs(dict.fromkeys(units, 1.0), dict.fromkeys(units, 1.0))
    queues = queues_of(sharded.plans)
    expected: Counter[str] = Counter()
    sizes = {}
    for scope, own in roles.items():
        for role, group in by_role(own).items():
            if seen[scope, role]:
                expected[queues[group.key]] += seen[scope, role]
                sizes[queues[group.key]] = group.size
    moved: Counter[str] = Counter()
    for task in program(schedules, sharded.plans, costs):
        if task.is_collective:
            _, each = loads(task.kind, "ring", [task.num_bytes] * sizes[task.queue])
            moved[task.queue] += each[0].sent_bytes
    assert moved == pytest.approx(expected)
