"""Bytes sent and memory held by real steps, of each scope, are those of the formulas."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from fsdp_support.trainings import (
    MICRO_BATCHES,
    STRATEGIES,
    Block,
    SmallModel,
    accumulated_step,
    check_gradients,
    flat_groups,
    model_of,
    open_two,
    shard,
    step_of,
    tokens,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.simulate.program import loads
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.compute_costs import Costs, program, queues_of
from pcomm.fsdp.report import ROLES, ideal_bytes, sent_bytes
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Roles, Scope
from pcomm.fsdp.sharded import Sharded

# -- bytes sent and memory held by real steps are those of the formulas -------------------------


@pytest.mark.parametrize(
    ("strategy", "prefetch"),
    [("zero3", 0), ("zero3", 1), ("zero3", 2), ("zero3, reduced once", 1), ("zero2", 2),
     ("zero1", 0)],
)  # fmt: skip
@ranks(2)
def test_bytes_are_those_of_the_formula(rank: int, strategy: str, prefetch: int) -> None:
    """(N - 1) / N P b for each gather and each reduce."""
    reshard = STRATEGIES[strategy]
    with open_two() as groups:
        gather, reduce = groups["dp", "gather"], groups["dp", "reduce"]
        gathers = gather.collectives = SpyCollectives(gather.collectives)
        reduces = reduce.collectives = SpyCollectives(reduce.collectives)
        model = model_of(torch.float32)
        precision = Precision(torch.bfloat16, torch.float32)
        sharded = fully_shard(
            model,
            Roles(gather, reduce),
            units=[Block],
            reshard=reshard,
            comm=CommPolicy(prefetch=prefetch),
            precision=precision,
        )
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        step_of(model, sharded, 0, rank)
        optimizer.step()
        gathers.clear()
        reduces.clear()
        step_of(model, sharded, 1, rank)
    root, *blocks = sharded.plans
    elements = {plan.name: plan.layout.length for plan in sharded.plans}
    total, block = sum(elements.values()), elements["blocks.0"]
    assert len(blocks) == 4
    if reshard.keep == "use":
        # Forward and backward of each micro-batch; the root stays, and so do the last units of
        # forward, which backward needs first.
        gathered = MICRO_BATCHES * (2 * total - elements[root.name] - (1 + prefetch) * block)
    else:
        gathered = total
    reduced = total * (MICRO_BATCHES if reshard.reduce == "micro_batch" else 1)
    assert gathers.sent_bytes == gathered * 2 // 2, strategy
    assert reduces.sent_bytes == reduced * 4 // 2, strategy
    assert set(gathers.counts) == {"all_gather"}
    assert set(reduces.counts) == {"reduce_scatter"}


@pytest.mark.parametrize(("prefetch", "backward"), [(0, None), (1, None), (2, None), (2, 0)])
@ranks(2)
def test_memory_is_given_back(rank: int, prefetch: int, backward: int | None) -> None:
    with open_two() as groups:
        model = SmallModel(num_blocks=7).double()
        comm = CommPolicy(prefetch=prefetch, inflight_reduce=2, prefetch_backward=backward)
        sharded = shard(model, groups, comm=comm)
        root, block = (plan.gathered_bytes for plan in sharded.plans[:2])
        gathered, gradients, in_backward = [], [], []

        def look(*_: object) -> None:
            memory = sharded.memory()
            gathered.append(memory["gathered"])
            gradients.append(memory["gradients"])
            taken = [one for group in flat_groups(sharded) for one in group.gradients.buffers]
            assert len({one.data_ptr() for one in taken}) == len(taken), "a buffer is used twice"

        def look_in_backward(*_: object) -> None:
            look()
            in_backward.append(gathered[-1])

        for one in model.blocks:
            one.down.register_forward_hook(look)
            one.norm.register_full_backward_hook(look_in_backward)
        for _ in range(2):
            in_backward.clear()
            assert sharded.memory()["gathered"] == sharded.memory()["gradients"] == 0
            model.loss(tokens(0, 0, rank)).backward()
            sharded.zero_grad()
        assert max(gathered) == root + (1 + prefetch) * block
        # The last ones of forward are still there; those after them come as backward says.
        depth = prefetch if backward is None else backward
        assert max(in_backward[1 + prefetch :]) == root + (1 + depth) * block
        # One that is filled, two on their way, and the root's, which fills up all along.
        assert max(gradients) <= root + 3 * block
        num_bytes = sum(
            plan.layout.shard_length * plan.main_dtype.itemsize for plan in sharded.plans
        )
        assert sharded.memory() == {
            "shards": num_bytes,
            "gathered": 0,
            "gradients": 0,
            "shard gradients": 0,
        }


@pytest.mark.parametrize("limit", ["less", "as much", "none"])
@ranks(2)
def test_a_budget_of_bytes_is_kept_by_a_real_step(rank: int, limit: str) -> None:
    """Both sides of what two units need, in bytes of what is gathered."""
    reference = model_of()
    (sum(reference.loss(tokens(0, 0, r)) for r in (0, 1)) / 2).backward()
    with open_two() as groups:
        block = shard(model_of(), groups).plans[1].gathered_bytes
        budget = {"less": 2 * block - 1, "as much": 2 * block, "none": None}[limit]
        model = model_of()
        comm = CommPolicy(prefetch=3, prefetch_bytes=budget)
        sharded = shard(model, groups, units=[Block], comm=comm)
        root = sharded.plans[0].gathered_bytes
        model.loss(tokens(0, 0, rank)).backward()
        sharded.zero_grad()
        seen: list[int] = []
        model.blocks[0].norm.register_forward_hook(
            lambda *_: seen.append((sharded.memory()["gathered"] - root) // block)
        )
        model.loss(tokens(0, 0, rank)).backward()
        # In forward and in backward: the one in use, and one, two or three ahead.
        assert seen[0] == {"less": 2, "as much": 3, "none": 4}[limit]
        check_gradients(sharded, reference)


# -- bytes of a report and of a program with experts, by scope, beside a spy and a formula ------

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


# Each axis alone is 1 once in the long form.
@pytest.mark.parametrize(
    ("rep", "edp", "ep", "strategy"),
    [
        (1, 2, 2, "zero3"),
        (1, 2, 2, "zero1"),
        (2, 1, 2, "zero3"),
        *(
            pytest.param(*sizes, strategy, marks=pytest.mark.soak)
            for sizes in [(1, 1, 4), (2, 1, 2), (2, 2, 1)]
            for strategy in ("zero3", "zero1")
            if (sizes, strategy) != ((2, 1, 2), "zero3")
        ),
    ],
)
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
