"""A report beside what really happens: bytes that are sent, storages that are allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.spy import SpyCollectives
from pcomm.core.groups import open_groups
from pcomm.core.simulate.cluster import Cluster, Communicator, Rail
from pcomm.core.simulate.engine import simulate
from pcomm.core.testing.ranks import ranks
from pcomm.core.topology import Topology
from pcomm.core.trace.event import COMPUTE
from pcomm.core.trace.recorder import Recorder
from pcomm.core.trace.traced import traced
from pcomm.fsdp.engine import Engine
from pcomm.fsdp.flat_group import FlatGroup
from pcomm.fsdp.fully_shard import fully_shard
from pcomm.fsdp.peak_memory import KINDS, peak_memory
from pcomm.fsdp.policy import CommPolicy, Precision
from pcomm.fsdp.roles import Roles
from pcomm.fsdp.schedule import Step
from pcomm.fsdp.sharded import Sharded
from pcomm.fsdp.simulated import Costs, program, queues_of, stretches
from pcomm.fsdp.strategy import Shard
from pcomm.fsdp.testing.small_models import Block, SmallModel

STRATEGIES = {
    "zero3": Shard.zero3(),
    "zero3, reduced once": Shard.zero3(reduce="step"),
    "zero2": Shard.zero2(),
    "zero1": Shard.zero1(),
}
MICRO = 2
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])


def step_of(model: SmallModel, sharded: Sharded) -> None:
    sharded.zero_grad()
    for micro in range(MICRO):
        with sharded.accumulate(is_last=micro == MICRO - 1):
            model.loss(TOKENS).backward()


def check_bytes(sizes: tuple[int, int], strategy: str) -> None:
    topology = Topology({"rep": sizes[1], "shard": sizes[0]}, order=("shard", "rep"))
    with open_groups(topology, ["shard", ("shard", "reduce"), "rep"]) as groups:
        roles = Roles(groups["shard"], groups["shard", "reduce"], groups["rep"])
        model = SmallModel()
        sharded = fully_shard(
            model,
            roles,
            units=[Block],
            shard=STRATEGIES[strategy],
            precision=Precision(torch.bfloat16, torch.float32),
        )
        step_of(model, sharded)
        sharded.parameters_changed()
        spies = {}
        for role, group in zip(
            ("gather", "reduce", "replicate"),
            (roles.gather, roles.reduce, roles.replicate),
            strict=True,
        ):
            assert group is not None
            spies[role] = group.collectives = SpyCollectives(group.collectives)
        step_of(model, sharded)
        report = sharded.report(micro_batches=MICRO)
        assert report.sent == {role: spy.sent_bytes for role, spy in spies.items()}
        assert report.sent["reduce"] > 0 or sizes[0] == 1
        assert (report.sent["replicate"] > 0) == (sizes[1] > 1)
        assert report.ideal is not None
        # Never less than the formula, but for the units that stay for backward.
        limit = 1 / (1 - report.padding)
        assert report.ideal["reduce"] <= report.sent["reduce"] <= limit * report.ideal["reduce"]
        kept = 1.0 if STRATEGIES[strategy].keep == "use" else 0.0
        assert report.sent["gather"] >= (1 - kept / 2) * report.ideal["gather"]
        assert report.sent["gather"] <= limit * report.ideal["gather"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_bytes_are_those_that_a_spy_counts(rank: int, strategy: str) -> None:
    for sizes in ((2, 1), (1, 2)):
        check_bytes(sizes, strategy)


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@ranks(4)
def test_bytes_with_replicas(rank: int, strategy: str) -> None:
    check_bytes((2, 2), strategy)


def allocated(groups: list[FlatGroup]) -> dict[str, int]:
    """Bytes of all distinct storages, found in the buffers themselves."""
    found: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}

    def add(kind: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.untyped_storage().nbytes():
            storage = tensor.untyped_storage()
            found[kind][storage.data_ptr()] = storage.nbytes()

    for group in groups:
        add("shards", group.shard)
        if group._full is not group.shard:
            add("gathered", group._full)
        add("gradients", group._gradient)
        add("gradients", group._reducing[1] if group._reducing else None)
        for free in group._reuse._free.values():
            for buffer in free:
                add("gradients", buffer)
        add("shard gradients", group._partial)
        for part in group.parts:
            add("shard gradients", part.grad)
    return {kind: sum(storages.values()) for kind, storages in found.items()}


@contextmanager
def watched(sharded: Sharded) -> Iterator[dict[str, int]]:
    """The most of each kind after any step of the engine, and of all together as `at_once`."""
    most = dict.fromkeys((*KINDS, "at_once"), 0)
    groups = [group for group in sharded._groups if isinstance(group, FlatGroup)]
    do = Engine._do

    def look(engine: Engine, step: Step) -> None:
        do(engine, step)
        now = allocated(groups)
        now["at_once"] = sum(now.values())
        for kind, size in now.items():
            most[kind] = max(most[kind], size)

    Engine._do = look  # type: ignore[method-assign]
    try:
        yield most
    finally:
        Engine._do = do  # type: ignore[method-assign]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(2)
def test_the_most_memory_is_that_of_a_real_step(
    rank: int, wire: torch.dtype | None, strategy: str
) -> None:
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
        for prefetch, inflight in ((0, 1), (1, 2), (2, 4)):
            model = SmallModel()
            sharded = fully_shard(
                model,
                roles,
                units=[Block],
                shard=STRATEGIES[strategy],
                comm=CommPolicy(prefetch=prefetch, inflight_reduce=inflight),
                precision=Precision(wire),
            )
            step_of(model, sharded)
            sharded.zero_grad()
            with watched(sharded) as most:
                step_of(model, sharded)
            memory = sharded.report(micro_batches=MICRO).memory
            assert memory is not None
            assert memory.by_kind | {"at_once": memory.at_once} == most


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
@ranks(2)
def test_the_most_memory_with_replicas(rank: int, sizes: tuple[int, int]) -> None:
    topology = Topology({"rep": sizes[1], "shard": sizes[0]}, order=("shard", "rep"))
    with open_groups(topology, ["shard", "rep"]) as groups:
        model = SmallModel()
        roles = Roles(groups["shard"], groups["shard"], groups["rep"])
        sharded = fully_shard(model, roles, units=[Block])
        step_of(model, sharded)
        sharded.zero_grad()
        with watched(sharded) as most:
            step_of(model, sharded)
        memory = sharded.report(micro_batches=MICRO).memory
        assert memory is not None
        assert memory.by_kind | {"at_once": memory.at_once} == most
        # The other way round: plans that are a little off do not fit.
        off = [replace(plan, reduce_dtype=torch.float64) for plan in sharded.plans]
        assert peak_memory(sharded.schedules(MICRO), off).by_kind != memory.by_kind


@ranks(2)
def test_a_recorded_step_is_reported_and_predicted(rank: int) -> None:
    recorder = Recorder(rank)
    with open_groups(Topology({"dp": 2}), [("dp", "gather"), ("dp", "reduce")]) as groups:
        roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
        model = SmallModel()
        sharded = fully_shard(model, roles, units=[Block])
        step_of(model, sharded)
        for group in (roles.gather, roles.reduce):
            group.collectives = traced(
                group.collectives, recorder, group=group.name, role=group.role
            )
        with sharded.recording(recorder):
            step_of(model, sharded)
        report = sharded.report(micro_batches=MICRO, events=recorder.events)
        assert report.overlap is not None
        assert 0 <= report.overlap.hidden <= 1
        moved = [event for event in recorder.events if event.is_communication]
        assert report.sent is not None
        assert sum(event.bytes for event in moved) == sum(report.sent.values())

        schedules = sharded.schedules(MICRO)
        costs = Costs.from_events(recorder.events, schedules[0], MICRO)
        spans = [event for event in recorder.events if event.queue == COMPUTE]
        computed = sum(sum(stretches(schedule, costs).values()) for schedule in schedules)
        assert computed == pytest.approx(sum(span.seconds for span in spans))
        tasks = program(schedules, sharded.plans, costs, num_shards=64)
        everyone = (tuple(range(64)),)
        queues = sorted(set(queues_of(sharded.plans).values()))
        assert queues == ["dp:gather", "dp:reduce"]
        cluster = Cluster(
            [Rail("nic", 1e9)], [Communicator(queue, "nic", everyone) for queue in queues]
        )
        timeline = simulate(dict.fromkeys(range(64), tasks), cluster)
        assert timeline.makespan_s > computed
        # The program has what the engine issued, in the order in which it issued it.
        names = [event.operation.split()[0] for event in sorted(moved, key=lambda e: e.start_s)]
        kinds = [task.kind for task in tasks if task.is_collective]
        assert [name.removesuffix("_async") for name in names] == kinds
