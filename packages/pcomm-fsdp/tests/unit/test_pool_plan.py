"""How much memory is reserved, beside what schedules of any model hold at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_support.schedules import ChainGroup, plan_of
from fsdp_support.trainings import Block, SmallModel
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.pool_backends import FakePools
from pcomm.core.memory.pools import PoolRegistry
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.registered_memory import ArenaPlan, plan_arenas
from pcomm.fsdp.runtime.schedule import (
    OnDemand,
    Operation,
    Phase,
    UnitEvent,
    compile_schedule,
    scheduled_group,
)
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Roles

Tree = dict[str, "Tree"]
SHARDS = [
    ReshardPolicy(),
    ReshardPolicy(reduce="step"),
    ReshardPolicy("backward"),
    ReshardPolicy.zero2(),
    ReshardPolicy.zero1(),
]


def group(role: str, communicator: object, name: str = "dp") -> Group:
    return ChainGroup(name, (0, 1), communicator, role=role)


ROLES = Roles(group("gather", object()), group("reduce", object()))


def units_of(tree: Tree, prefix: str = "") -> Iterator[str]:
    for name, children in tree.items():
        yield f"{prefix}{name}"
        yield from units_of(children, f"{prefix}{name}.")


def events_of(tree: Tree, phase: Phase, prefix: str = "") -> Iterator[UnitEvent]:
    """What nested units do one after another, and in backward the other way round."""
    for name in tree if phase == "forward" else reversed(tree):
        yield UnitEvent("use", f"{prefix}{name}", phase)
        yield from events_of(tree[name], phase, f"{prefix}{name}.")
        yield UnitEvent("done", f"{prefix}{name}", phase)


def program_of(tree: Tree, *, has_backward: bool = True) -> list[UnitEvent]:
    events: list[UnitEvent] = []
    for phase in ("forward", "backward") if has_backward else ("forward",):
        events += [
            UnitEvent("use", ROOT, phase),
            *events_of(tree, phase),
            UnitEvent("done", ROOT, phase),
        ]
    return [*events, UnitEvent("end", ROOT, "backward" if has_backward else "forward")]


def most_live(
    steps: Sequence[Operation], arena: ArenaPlan, plans: Sequence[GroupPlan], live: set[str]
) -> int:
    """The most buffers of an arena that there are at any step, by the plainest count.

    A gradient is there from the first moment of its unit's backward. `live` is what there is
    before, and then what there is after.
    """
    most = len(live)
    for step in steps:
        if arena.use == "gather":
            live |= {step.name} if step.kind == "gather" else set()
            live -= {step.name} if step.kind == "release" else set()
        else:
            if step.kind == "use" and step.phase == "backward":
                live |= {plan.name for plan in plans if plan.unit == step.name}
            live |= {step.name} if step.kind == "reduce" else set()
            live -= {step.name} if step.kind == "wait_reduce" else set()
        live &= set(arena.plans)
        most = max(most, len(live))
    return most


def live_while(
    tree: Tree, plans: Sequence[GroupPlan], comm: CommPolicy, arena: ArenaPlan
) -> Iterator[int]:
    """The most buffers of an arena in each micro-batch of a run: recorded, replayed, evaluated."""
    gathered: frozenset[str] = frozenset()
    live: set[str] = set()
    program, evaluation = program_of(tree), program_of(tree, has_backward=False)
    for number, events in enumerate([program, program, evaluation, program, program]):
        is_last = number % 3 != 0 and events is program
        buffers = [scheduled_group(plan, is_last=is_last) for plan in plans]
        if number == 0:
            recording = OnDemand(
                buffers, inflight_reduce=comm.inflight_reduce, gathered=gathered, is_last=is_last
            )
            steps = [step for event in events for step in recording.steps_for(event)]
            gathered = recording.gathered
        else:
            schedule = compile_schedule(
                events,
                buffers,
                prefetch=comm.prefetch,
                prefetch_bytes=comm.prefetch_bytes,
                inflight_reduce=comm.inflight_reduce,
                gathered=gathered,
                is_last=is_last,
                prefetch_backward=comm.prefetch_backward,
            )
            steps, gathered = list(schedule.steps), schedule.gathered_at_end
        yield most_live(steps, arena, plans, live)


trees = st.recursive(
    st.just({}),
    lambda inner: st.lists(inner, max_size=5).map(
        lambda children: {f"u{i}": child for i, child in enumerate(children)}
    ),
    max_leaves=12,
)


@st.composite
def models(draw: st.DrawFn) -> tuple[Tree, list[GroupPlan]]:
    """Nested units with up to two parameter groups each, of a few sizes and strategies."""
    tree = draw(trees)
    shards = st.sampled_from([ReshardPolicy(), *draw(st.sampled_from([[], SHARDS]))])
    plans = []
    for unit in (ROOT, *units_of(tree)):
        for number in range(draw(st.integers(1, 2))):
            elements = draw(st.sampled_from([16, 32, 34, 100]))
            plan = plan_of(unit, ROLES, elements=elements, reshard=draw(shards))
            plans.append(replace(plan, name=f"{unit}/{number}"))
    return tree, plans


@given(
    models(),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([None, 0, 200]),
    st.sampled_from([None, 0, 2]),
)
def test_no_schedule_holds_more_than_is_reserved(
    model: tuple[Tree, list[GroupPlan]],
    prefetch: int,
    inflight: int,
    limit: int | None,
    backward: int | None,
) -> None:
    tree, plans = model
    comm = CommPolicy(
        prefetch=prefetch,
        inflight_reduce=inflight,
        prefetch_bytes=limit,
        prefetch_backward=backward,
    )
    arenas = plan_arenas(plans, comm)
    for use in ("gather", "reduce"):
        names = [name for arena in arenas if arena.use == use for name in arena.plans]
        assert sorted(names) == sorted(plan.name for plan in plans)
    for arena in arenas:
        assert max(live_while(tree, plans, comm, arena)) <= arena.num_slots <= len(arena.plans)


@pytest.mark.parametrize(("forward", "backward"), [(0, None), (1, None), (3, None), (0, 2), (2, 0)])
@pytest.mark.parametrize("inflight", [1, 2])
def test_units_in_a_row_need_all_that_is_reserved(
    forward: int, backward: int | None, inflight: int
) -> None:
    """One place less would not do: the unit in use and those ahead; one is filled, others go."""
    tree: Tree = {f"block{i}": {} for i in range(8)}
    plans = [plan_of(ROOT, ROLES, elements=999)]
    plans += [plan_of(unit, ROLES) for unit in tree]
    comm = CommPolicy(prefetch=forward, inflight_reduce=inflight, prefetch_backward=backward)
    found = {(arena.use, len(arena.plans)): arena for arena in plan_arenas(plans, comm)}
    assert {key: arena.num_slots for key, arena in found.items()} == {
        ("gather", 1): 1,
        ("gather", 8): 1 + max(forward, backward or 0),
        ("reduce", 1): 1,
        ("reduce", 8): 1 + inflight,
    }
    for arena in found.values():
        assert max(live_while(tree, plans, comm, arena)) == arena.num_slots


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(0, 2))
def test_sizes_share_arenas_where_that_takes_the_fewest_bytes(
    lengths: list[int], prefetch: int
) -> None:
    """Against every way to give each size an arena, written down and counted."""
    plans = [plan_of(f"b{i}", ROLES, elements=2 * n) for i, n in enumerate(lengths)]
    comm = CommPolicy(prefetch=prefetch)
    found = [arena for arena in plan_arenas(plans, comm) if arena.use == "gather"]
    cost = sum(arena.num_slots * arena.slot_bytes for arena in found)

    def cheapest(left: list[int], classes: list[list[int]]) -> int:
        if not left:
            return sum(max(own) * 8 * min(len(own), 1 + prefetch) for own in classes)
        first, *rest = left
        options = [cheapest(rest, [*classes, [first]])]
        for place, own in enumerate(classes):
            joined = [*classes[:place], [*own, first], *classes[place + 1 :]]
            options.append(cheapest(rest, joined))
        return min(options)

    assert cost == cheapest(sorted(lengths), [])


def test_what_no_communicator_sends_gets_no_arena() -> None:
    alone = Roles(Group("dp", (0,), None, role="gather"), Group("dp", (0,), None, role="reduce"))
    backend = FakePools()
    registry = PoolRegistry(Groups([]), alone.gather, backend)
    model = SmallModel()
    sharded = fully_shard(
        model, alone, units=[Block], precision=Precision(torch.bfloat16), pools=registry
    )
    model.loss(torch.tensor([[1, 2, 3]])).backward()
    assert {(plan.gather_pool, plan.reduce_pool) for plan in sharded.plans} == {("", "")}
    assert "registered memory: none" in str(sharded.report())
    assert backend.log == []
    frozen = replace(plan_of("a", ROLES), is_trainable=False)
    assert [arena.use for arena in plan_arenas([frozen], CommPolicy())] == ["gather"]


def test_uses_and_communicators_never_share() -> None:
    """One communicator for both uses, and another one for experts: four arenas."""
    shared, experts = group("gather", object()), group("gather", object(), "edp")
    plans = [
        plan_of("a", Roles(shared, shared)),
        replace(plan_of("b", Roles(experts, experts)), scope="expert"),
        # Another name for the first communicator.
        plan_of("c", Roles(*[group("gather", shared.process_group, "dp_cp")] * 2)),
    ]
    found = plan_arenas(plans, CommPolicy())
    assert [(arena.use, arena.group.key, arena.plans) for arena in found] == [
        ("gather", "dp[gather]", ("a.w", "c.w")),
        ("gather", "edp[gather]", ("b.w",)),
        ("reduce", "dp[gather]", ("a.w", "c.w")),
        ("reduce", "edp[gather]", ("b.w",)),
    ]
    assert len({arena.name for arena in found}) == 4
