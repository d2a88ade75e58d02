"""Everything that is measured on one number of ranks: called on each of them."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.group import Group
from pcomm.core.groups import GroupSpec, open_groups
from pcomm.core.options import CommOptions
from pcomm.core.testing.namespaces import RatedNetwork, traffic
from pcomm.core.testing.timing import Timing
from pcomm.core.topology import Topology
from pcomm.core.world import connect
from pcomm.fsdp.bench.bounds import Step, lower_bounds_s
from pcomm.fsdp.bench.memory import can_count, in_use_bytes, peak_bytes
from pcomm.fsdp.bench.models import Problem, Reference, squared_norm
from pcomm.fsdp.bench.prediction import Prediction, latency_of, predict, recorded_costs
from pcomm.fsdp.bench.settings import (
    FSDP2,
    FSDP2_TUNED,
    FSDP2_TWO_RAILS,
    NO_PREFETCH,
    ONE,
    TWO,
    TWO_RAILS,
    UNSHARDED,
    Settings,
)
from pcomm.fsdp.bench.trainings import Fsdp2, Sharding, Training, Unsharded
from pcomm.fsdp.sharded import Sharded

__all__ = ["GATHER", "REDUCE", "Found", "measure_alone", "measure_on_rank"]

GATHER, REDUCE = "all-gather alone", "reduce-scatter alone"
# Enough to record and to replay.
_WARM_STEPS = 2
# Far above rounding, far below one unit's part.
_NORM_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Found:
    """What was measured for one model on one number of ranks.

    Args:
        model: Its name.
        num_ranks: Number of ranks.
        timings: Of each case, as the slowest rank had it.
        sent_bytes: Of each case, what its interfaces sent in a step, with headers; the mean over
            the rounds on the rank that sent most.
        peak_bytes: Of each case, on the rank that needed most; empty where nobody counts.
        steps: Of each case, what had to be done.
        bounds_s: Of each case, the lower bounds on one link and on independent links.
        prediction: Of our cases, what the simulator says; None on one rank.
    """

    model: str
    num_ranks: int
    timings: Mapping[str, Timing]
    sent_bytes: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    steps: Mapping[str, Step]
    bounds_s: Mapping[str, tuple[float, float]]
    prediction: Prediction | None = None


def measure_on_rank(settings: Settings, network: RatedNetwork) -> list[Found]:
    """All models on the ranks of this world, over `network`. Collective; alike on every rank."""
    with connect(backend="gloo") as world:
        topology = Topology({"dp": world.size})
        # What ranks tell each other between steps stays on loopback.
        with open_groups(topology, [("dp", "control")]) as outside:
            control = outside["dp", "control"].collectives
            with network.inside(world.rank):
                rails = (("gather", 0), ("reduce", 0), ("other rail", 1))
                specs = [_spec(role, network, rail) for role, rail in rails]
                with open_groups(topology, specs) as groups:
                    found = []
                    for name in settings.models:
                        if world.rank == 0:
                            print(f"{name}, {world.size} ranks ...", file=sys.stderr, flush=True)
                        problem = Problem(name, settings.widths(name))
                        own = [groups["dp", spec.role] for spec in specs]
                        found.append(_measure(problem, settings, network, control, *own))
                    return found


def measure_alone(settings: Settings) -> list[Found]:
    """All models on one rank, which has nothing to send."""
    with connect(backend="gloo") as world:
        assert world.size == 1
        return [_measure_alone(Problem(n, settings.widths(n)), settings) for n in settings.models]


def _measure_alone(problem: Problem, settings: Settings) -> Found:
    assert dist.group.WORLD is not None
    with open_groups(Topology({"dp": 1}), ["dp", ("dp", "reduce")]) as groups:
        control = groups["dp"].collectives
        trainings: dict[str, Training] = {
            UNSHARDED: Unsharded(problem),
            FSDP2: Fsdp2(problem, dist.group.WORLD),
            ONE: Sharding(problem, groups["dp"], groups["dp", "reduce"]),
        }
        reference = Reference.of(problem, control)
        for case, training in trainings.items():
            _check(case, training, problem, control, reference)
        turns = {case: _turn(t, problem, control) for case, t in trainings.items()}
        timings, _ = _take_turns(turns, control, settings.alone_rounds)
        return Found(problem.name, 1, timings, {}, {}, {}, {})


def _spec(role: str, network: RatedNetwork, rail: int) -> GroupSpec:
    # One worker thread makes a communicator a queue, which is what NCCL's are.
    options = CommOptions(threads=1, interface=network.interfaces[rail], strict=True)
    return GroupSpec("dp", role, options)


def _measure(
    problem: Problem,
    settings: Settings,
    network: RatedNetwork,
    control: Collectives,
    gather: Group,
    reduce: Group,
    other: Group,
) -> Found:
    assert gather.process_group is not None
    one, ours = gather.process_group, gather.collectives
    makers: dict[str, Callable[[], Training]] = {
        UNSHARDED: lambda: Unsharded(problem),
        FSDP2: lambda: Fsdp2(problem, one),
        FSDP2_TUNED: lambda: Fsdp2(problem, one, prefetch=1, reduce=ours),
        FSDP2_TWO_RAILS: lambda: Fsdp2(problem, one, prefetch=1, reduce=other.collectives),
        ONE: lambda: Sharding(problem, gather, gather),
        NO_PREFETCH: lambda: Sharding(problem, gather, reduce, prefetch=0),
        TWO: lambda: Sharding(problem, gather, reduce),
        TWO_RAILS: lambda: Sharding(problem, gather, other),
    }
    reference = Reference.of(problem, control)
    trainings, peaks = _build(makers, problem, control, reference)
    expected = squared_norm(list(reference.exact.values()))
    turns = {
        case: _turn(training, problem, control, None if case == UNSHARDED else expected)
        for case, training in trainings.items()
    }
    turns |= _collectives_alone(problem, ours)
    forwards: list[float] = []
    timings, sent = _take_turns(turns, control, settings.rounds)
    for _ in range(settings.rounds):
        forwards.append(_forward_s(trainings[UNSHARDED], problem, control))
    forward_s = min(forwards)
    backward_s = max(0.0, timings[UNSHARDED].fastest_us / 1e6 - forward_s)
    steps = {
        case: Step(
            problem.unit_bytes(),
            control.size,
            training.num_backward_gathers,
            forward_s,
            backward_s,
        )
        for case, training in trainings.items()
        if case != UNSHARDED
    }
    bounds = {case: lower_bounds_s(step, network.bytes_per_s) for case, step in steps.items()}
    sharded = {case: t.sharded for case, t in trainings.items() if isinstance(t, Sharding)}
    prediction = _predict(sharded, steps[ONE], turns[ONE], timings, settings, network, control)
    return Found(problem.name, control.size, timings, sent, peaks, steps, bounds, prediction)


def _build(
    makers: Mapping[str, Callable[[], Training]],
    problem: Problem,
    control: Collectives,
    reference: Reference,
) -> tuple[dict[str, Training], dict[str, int]]:
    """Make and check every training, and find its peak of memory on the way."""
    trainings, peaks = {}, {}
    one_row = problem.batch(control.rank, rows=1)

    def steps(training: Training) -> None:
        for _ in range(_WARM_STEPS):
            training.forget_gradients()
            problem.loss(training.model, one_row).backward()

    for case in (FSDP2, ONE):
        # What the first of a kind leaves behind for good is not the next one's memory.
        steps(makers[case]())
    for case, make in makers.items():
        gc.collect()
        base = in_use_bytes() if can_count() else 0
        training = trainings[case] = make()
        steps(training)
        if can_count():
            own = peak_bytes(lambda training=training: steps(training), base)  # type: ignore[misc]
            peaks[case] = int(control.all_reduce(torch.tensor([own]), op="max"))
        if case != UNSHARDED:
            _check(case, training, problem, control, reference)
    return trainings, peaks


def _check(
    case: str, training: Training, problem: Problem, control: Collectives, reference: Reference
) -> None:
    """Compare the gradients of a step with those that it must have. Collective."""
    for _ in range(1 if control.size > 1 else _WARM_STEPS):
        training.forget_gradients()
        problem.loss(training.model, problem.batch(control.rank)).backward()
    try:
        reference.check(training.whole_gradients())
    except AssertionError as difference:
        raise AssertionError(f"{case}: {difference}") from difference


@dataclass(frozen=True)
class _Turn:
    """A case, and what goes before and after it outside of its time."""

    prepare: Callable[[], None]
    run: Callable[[], None]
    check: Callable[[], None]


def _turn(
    training: Training, problem: Problem, control: Collectives, expected: Tensor | None = None
) -> _Turn:
    batch = problem.batch(control.rank)

    def run() -> None:
        problem.loss(training.model, batch).backward()

    def check() -> None:
        if expected is not None:
            # Each rank has a shard of the same gradients.
            norm = control.all_reduce(squared_norm(training.shard_gradients()))
            torch.testing.assert_close(norm, expected, rtol=_NORM_TOLERANCE, atol=0.0)

    return _Turn(training.forget_gradients, run, check)


def _collectives_alone(problem: Problem, collectives: Collectives) -> dict[str, _Turn]:
    """All units once, one after another, with nothing beside it."""
    lengths = [size // 4 // collectives.size * collectives.size for size in problem.unit_bytes()]
    wholes = [torch.zeros(length) for length in lengths]
    shards = [torch.zeros(length // collectives.size) for length in lengths]

    def gather() -> None:
        for whole, shard in zip(wholes, shards, strict=True):
            collectives.all_gather(shard, out=whole)

    def reduce() -> None:
        for whole, shard in zip(wholes, shards, strict=True):
            collectives.reduce_scatter(whole, out=shard)

    return {GATHER: _Turn(_nothing, gather, _nothing), REDUCE: _Turn(_nothing, reduce, _nothing)}


def _predict(
    sharded: Mapping[str, Sharded],
    step: Step,
    turn: _Turn,
    timings: Mapping[str, Timing],
    settings: Settings,
    network: RatedNetwork,
    control: Collectives,
) -> Prediction:
    """What the simulator says of our cases, if units compute as they do with one group.

    Neither that step nor any other enters as a whole, but what units compute in it, and
    collectives that were timed alone. Collective.
    """

    def run() -> None:
        turn.prepare()
        control.all_reduce(torch.zeros(1))
        turn.run()

    costs = recorded_costs(sharded[ONE], run, settings.rounds, control)
    latency_s = latency_of(
        (timings[GATHER].median_us + timings[REDUCE].median_us) / 1e6,
        # A unit sends as much to gather it as to reduce it.
        num_bytes=2 * step.reduce_bytes(),
        num_operations=2 * len(step.unit_bytes),
        bytes_per_s=network.bytes_per_s,
    )
    return predict(sharded, costs, bytes_per_s=network.bytes_per_s, latency_s=latency_s)


def _take_turns(
    turns: Mapping[str, _Turn], control: Collectives, rounds: int
) -> tuple[dict[str, Timing], dict[str, float]]:
    """In each round every case once. Collective; the same result on every rank."""
    times: dict[str, list[float]] = {case: [] for case in turns}
    sent = dict.fromkeys(turns, 0)
    for index in range(-1, rounds):
        for case, turn in turns.items():
            turn.prepare()
            control.all_reduce(torch.zeros(1))
            before = _sent_bytes()
            seconds = _seconds(turn.run, control)
            turn.check()
            # One round goes before and does not count.
            if index >= 0:
                times[case].append(seconds * 1e6)
                sent[case] += _sent_bytes() - before
    timings = {case: Timing(case, tuple(rounds_us)) for case, rounds_us in times.items()}
    means = torch.tensor([sent[case] / rounds for case in turns], dtype=torch.float64)
    most = control.all_reduce(means, op="max").tolist()
    return timings, dict(zip(turns, most, strict=True))


def _seconds(run: Callable[[], None], control: Collectives) -> float:
    """Seconds that the slowest rank takes. Collective."""
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(control.all_reduce(taken, op="max"))


def _forward_s(training: Training, problem: Problem, control: Collectives) -> float:
    batch = problem.batch(control.rank)
    control.all_reduce(torch.zeros(1))

    def run() -> None:
        problem.loss(training.model, batch)

    return _seconds(run, control)


def _sent_bytes() -> int:
    """What this rank's links have carried away, on all rails together."""
    return sum(found.sent_bytes for name, found in traffic().items() if name != "lo")


def _nothing() -> None:
    return None
