"""A report beside what really happens: bytes that are sent, storages that are allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import (
    MICRO_BATCHES,
    STAGES,
    STRATEGIES,
    Block,
    SmallModel,
    accumulated_step,
    flat_groups,
    open_two,
    replicated,
    roles_of,
    shard,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.memory.pool_backends import FakePools
from pcomm.core.memory.pools import PoolRegistry
from pcomm.core.simulate.engine import simulate
from pcomm.core.simulate.program import Cluster, Rail, SimulatedCommunicator
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.core.topology import Topology
from pcomm.core.trace.events import COMPUTE
from pcomm.core.trace.recording import Recorder, traced
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.compute_costs import Costs, compute_segments, program, queues_of
from pcomm.fsdp.report import KINDS, PeakMemory, peak_memory
from pcomm.fsdp.runtime.fsdp_runtime import FsdpRuntime
from pcomm.fsdp.runtime.param_group import ParamGroup
from pcomm.fsdp.runtime.schedule import Operation
from pcomm.fsdp.settings import CommPolicy, Precision, Roles, Scope
from pcomm.fsdp.sharded import Sharded


class OneOrTwo(nn.Module):
    """Units of as many elements, some with one parameter and some with two."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(
            nn.Linear(4, 4, bias=False) if kind == "1" else Two() for kind in "1121121"
        )

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """A number that all parameters have a part in."""
        return self(tokens_BT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = torch.outer(tokens_BT[0].float(), torch.ones(4))
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x.square().sum()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(4, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.left, x @ self.right], dim=-1)


def check_bytes(sizes: tuple[int, int], strategy: str) -> None:
    with replicated(*sizes) as roles:
        model = SmallModel()
        sharded = fully_shard(
            model,
            roles,
            units=[Block],
            reshard=STRATEGIES[strategy],
            precision=Precision(torch.bfloat16, torch.float32),
        )
        accumulated_step(model, sharded)
        sharded.parameters_changed()
        spies = {}
        for role, group in zip(
            ("gather", "reduce", "replicate"),
            (roles.gather, roles.reduce, roles.replicate),
            strict=True,
        ):
            assert group is not None
            spies[role] = group.collectives = SpyCollectives(group.collectives)
        accumulated_step(model, sharded)
        report = sharded.report(micro_batches=MICRO_BATCHES)
        assert report.sent == {role: spy.sent_bytes for role, spy in spies.items()}
        assert report.sent["reduce"] > 0 or sizes[0] == 1
        assert (report.sent["replicate"] > 0) == (sizes[1] > 1)
        assert report.ideal is not None
        # Never less than the formula, but for the units that stay for backward.
        limit = 1 / (1 - report.padding)
        assert report.ideal["reduce"] <= report.sent["reduce"] <= limit * report.ideal["reduce"]
        kept = 1.0 if STRATEGIES[strategy].keep == "use" else 0.0
        assert report.sent["gather"] >= (1 - kept / 2) * report.ideal["gather"]
        gathered = report.ideal["gather"] - report.kept
        assert gathered <= report.sent["gather"] <= limit * gathered


@pytest.mark.parametrize("strategy", STAGES)
@ranks(2)
def test_bytes_are_those_that_a_spy_counts(rank: int, strategy: str) -> None:
    for sizes in ((2, 1), (1, 2)):
        check_bytes(sizes, strategy)


def allocated(groups: list[ParamGroup], registry: PoolRegistry | None = None) -> dict[str, int]:
    """Bytes of all distinct storages, found in the buffers themselves, and of all segments."""
    found: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
    arenas = [binding.arena for binding in registry.bindings] if registry else []
    in_segments = {id(place[0]()) for arena in arenas for place in arena.pool._places}

    def add(kind: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.untyped_storage().nbytes():
            storage = tensor.untyped_storage()
            if id(storage) not in in_segments:
                found[kind][storage.data_ptr()] = storage.nbytes()

    for group in groups:
        add("shards", group.shard.flat)
        if group.unsharded.flat is not group.shard.flat:
            add("gathered", group.unsharded.flat)
        for buffer in group.gradients.buffers:
            add("gradients", buffer)
        for free in group.gradients._pool._free.values():
            for buffer in free:
                add("gradients", buffer)
        add("shard gradients", group.gradients._sum)
        for part in group.shard.parameters:
            add("shard gradients", part.grad)
    for arena in arenas:
        kind = "gathered" if arena.name.startswith("fsdp gather") else "gradients"
        found[kind] |= arena.pool.segments
    return {kind: sum(storages.values()) for kind, storages in found.items()}


@contextmanager
def watched(sharded: Sharded, registry: PoolRegistry | None = None) -> Iterator[dict[str, int]]:
    """The most of each kind after any step of the runtime, and of all together as `at_once`."""
    most = dict.fromkeys((*KINDS, "at_once"), 0)
    groups = flat_groups(sharded)
    do = FsdpRuntime._do

    def look(runtime: FsdpRuntime, step: Operation) -> None:
        do(runtime, step)
        now = allocated(groups, registry)
        now["at_once"] = sum(now.values())
        for kind, size in now.items():
            most[kind] = max(most[kind], size)

    FsdpRuntime._do = look  # type: ignore[method-assign]
    try:
        yield most
    finally:
        FsdpRuntime._do = do  # type: ignore[method-assign]


def check_memory(
    model: SmallModel, sharded: Sharded, registry: PoolRegistry | None = None
) -> PeakMemory:
    """The report says what the storages of a step, the second one, take at most."""
    accumulated_step(model, sharded)
    sharded.zero_grad()
    with watched(sharded, registry) as most:
        accumulated_step(model, sharded)
    memory = sharded.report(micro_batches=MICRO_BATCHES).memory
    assert memory is not None
    assert memory.by_kind | {"at_once": memory.at_once} == most
    return memory


@pytest.mark.parametrize(
    ("strategy", "wire"),
    [(one, (None, torch.bfloat16)[number % 2]) for number, one in enumerate(STAGES)],
    ids=str,
)
@ranks(2)
def test_the_most_memory_is_that_of_a_real_step(
    rank: int, wire: torch.dtype | None, strategy: str
) -> None:
    with open_two() as groups:
        for prefetch, inflight in ((0, 1), (1, 2), (2, 4)):
            model = SmallModel()
            comm = CommPolicy(prefetch=prefetch, inflight_reduce=inflight)
            reshard, precision = STRATEGIES[strategy], Precision(wire)
            check_memory(
                model, shard(model, groups, reshard=reshard, comm=comm, precision=precision)
            )


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
@ranks(2)
def test_the_most_memory_with_replicas(rank: int, sizes: tuple[int, int]) -> None:
    with replicated(*sizes) as roles:
        model = SmallModel()
        sharded = fully_shard(model, roles, units=[Block])
        memory = check_memory(model, sharded)
        # The other way round: plans that are a little off do not fit.
        off = [replace(plan, reduce_dtype=torch.float64) for plan in sharded.plans]
        assert peak_memory(sharded.schedules(MICRO_BATCHES), off).by_kind != memory.by_kind


@pytest.mark.parametrize(
    ("sizes", "inflight", "wire", "strategy"),
    [
        ((2, 1), 1, None, "zero3"),
        ((2, 1), 2, torch.bfloat16, "zero3, reduced once"),
        ((2, 1), 1, None, "zero2"),
        ((2, 1), 2, torch.bfloat16, "zero1"),
        ((1, 2), 1, None, "zero3"),
        ((1, 2), 1, torch.bfloat16, "zero2"),
        ((1, 2), 1, None, "zero1"),
    ],
    ids=str,
)
@ranks(2)
def test_the_most_memory_where_gradients_are_reduced_as_autograd_made_them(
    rank: int, sizes: tuple[int, int], inflight: int, wire: torch.dtype | None, strategy: str
) -> None:
    """Such a gradient is neither put into another unit's buffer nor left for another unit."""
    with replicated(*sizes) as roles:
        model = OneOrTwo()
        sharded = fully_shard(
            model,
            roles,
            units=[nn.Linear, Two],
            reshard=STRATEGIES[strategy],
            comm=CommPolicy(inflight_reduce=inflight),
            precision=Precision(wire),
        )
        assert {plan.takes_gradient_over for plan in sharded.plans} == {True, False}
        check_memory(model, sharded)


@pytest.mark.parametrize("strategy", STAGES)
@ranks(2)
def test_the_most_memory_is_what_pools_reserve(rank: int, strategy: str) -> None:
    """Segments are held all the time; what no communicator sends comes and goes beside them."""
    alone = Roles(Group("alone", (rank,), None), Group("alone", (rank,), None))
    scope = Scope(lambda name, _: name.endswith("up.weight"), alone)
    specs = [("dp", "gather"), ("dp", "reduce"), ("dp", "control")]
    with open_groups(Topology({"dp": 2}), specs) as groups:
        roles = roles_of(groups)
        for comm in (CommPolicy(), CommPolicy("never", prefetch=2, inflight_reduce=2)):
            registry = PoolRegistry(
                groups, groups["dp", "control"], FakePools(), timeout_s=PATIENCE_S
            )
            model = SmallModel()
            sharded = fully_shard(
                model,
                roles,
                units=[Block],
                scopes={"alone": scope},
                reshard=STRATEGIES[strategy],
                comm=comm,
                precision=Precision(torch.bfloat16, torch.float32),
                pools=registry,
            )
            assert {bool(plan.gather_pool) for plan in sharded.plans} == {True, False}
            check_memory(model, sharded, registry)


@ranks(2)
def test_a_recorded_step_is_reported_and_predicted(rank: int) -> None:
    recorder = Recorder(rank)
    with open_two() as groups:
        roles = roles_of(groups)
        model = SmallModel()
        sharded = fully_shard(model, roles, units=[Block])
        accumulated_step(model, sharded)
        for group in (roles.gather, roles.reduce):
            group.collectives = traced(
                group.collectives, recorder, group=group.name, role=group.role
            )
        with sharded.recording(recorder):
            accumulated_step(model, sharded)
        report = sharded.report(micro_batches=MICRO_BATCHES, events=recorder.events)
        assert report.overlap is not None
        assert 0 <= report.overlap.hidden <= 1
        moved = [event for event in recorder.events if event.is_communication]
        assert report.sent is not None
        assert sum(event.bytes for event in moved) == sum(report.sent.values())

        schedules = sharded.schedules(MICRO_BATCHES)
        costs = Costs.from_events(recorder.events, schedules[0], MICRO_BATCHES)
        spans = [event for event in recorder.events if event.queue == COMPUTE]
        computed = sum(sum(compute_segments(schedule, costs).values()) for schedule in schedules)
        assert computed == pytest.approx(sum(span.seconds for span in spans))
        tasks = program(schedules, sharded.plans, costs, num_shards=64)
        everyone = (tuple(range(64)),)
        queues = sorted(set(queues_of(sharded.plans).values()))
        assert queues == ["dp:gather", "dp:reduce"]
        cluster = Cluster(
            [Rail("nic", 1e9)], [SimulatedCommunicator(queue, "nic", everyone) for queue in queues]
        )
        timeline = simulate(dict.fromkeys(range(64), tasks), cluster)
        assert timeline.makespan_s > computed
        # The program has what the runtime issued, in the order in which it issued it.
        names = [event.operation.split()[0] for event in sorted(moved, key=lambda e: e.start_s)]
        kinds = [task.kind for task in tasks if task.is_collective]
        assert [name.removesuffix("_async") for name in names] == kinds
