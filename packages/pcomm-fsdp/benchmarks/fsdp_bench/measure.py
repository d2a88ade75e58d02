"""Everything that is measured on one number of ranks: called on each of them."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from core_bench.rated_network import RatedNetwork, traffic
from core_bench.runner import Timing
from core_bench.runner import take_turns as in_turns
from fsdp_bench.predictions import (
    Prediction,
    StepWork,
    latency_of,
    lower_bounds_s,
    predict,
    recorded_costs,
)
from fsdp_bench.settings import (
    FSDP2,
    NO_PAIRS,
    ONE,
    OURS,
    THEIRS,
    UNSHARDED,
    Form,
    LinkRate,
    Settings,
)
from fsdp_bench.trainings import (
    BenchModel,
    Fsdp2,
    Reference,
    Sharding,
    Training,
    Unsharded,
    make,
    run_step,
    squared_norm,
)
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.process.world import connect
from pcomm.core.topology import Topology

GATHER, REDUCE = "all-gather alone", "reduce-scatter alone"
BESIDE = "unsharded beside all-gathers and reduce-scatters"


# Enough to record and to replay.
_WARM_STEPS = 2


# Far above rounding, far below one unit's part.
_NORM_TOLERANCE = 1e-4


Maker = Callable[[], Training]


@dataclass(frozen=True)
class FsdpResult:
    """Measurements of one model on one number of ranks.

    Args:
        model: Its name.
        num_ranks: Number of ranks.
        timings: Timing of each case on the slowest rank.
        sent_bytes: Bytes that the interfaces sent in a step of each case, with headers; the mean
            over the rounds on the rank that sent most.
        peak_bytes: Peak of memory of each case, on the rank that needed most; empty where it was
            not counted.
        steps: The least work of a step of each case.
        bounds_s: Lower bounds of each case, on one link and on independent links.
        prediction: Times of our cases in the simulator; None without any, and on one rank.
        link: Rates of the links.
    """

    model: str
    num_ranks: int
    timings: Mapping[str, Timing]
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, StepWork] = field(default_factory=dict)
    bounds_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    prediction: Prediction | None = None
    link: LinkRate = field(default_factory=LinkRate)


def measure_on_rank(settings: Settings, link: LinkRate, network: RatedNetwork) -> list[FsdpResult]:
    """All models on the ranks of this world, over `network`. Collective; alike on every rank.

    Args:
        settings: The cases to measure.
        link: Rates of the links of `network`, and the batch of each rank.
        network: The network that the groups are opened in.
    """
    with connect(backend="gloo") as world:
        topology = Topology({"dp": world.size})
        # What ranks tell each other between steps stays on loopback.
        with open_groups(topology, [("dp", "control")]) as outside:
            control = outside["dp", "control"].collectives
            with network.inside(world.rank):
                rails = (("gather", 0), ("reduce", 0), ("other rail", 1))
                specs = [_spec(role, network, rail) for role, rail in rails]
                with open_groups(topology, specs) as groups:
                    own = {spec.role: groups["dp", spec.role] for spec in specs}
                    found = []
                    for name in settings.models:
                        if world.rank == 0:
                            place = ", ".join(
                                filter(None, (f"{world.size} ranks", name, link.name))
                            )
                            print(f"{place} ...", file=sys.stderr, flush=True)
                        problem = BenchModel(name, settings.widths(name, link))
                        found.append(_measure(problem, settings, link, network, control, own))
                    return found


def measure_alone(settings: Settings) -> list[FsdpResult]:
    """All models on one rank, which has nothing to send."""
    with connect(backend="gloo") as world:
        assert world.size == 1
        return [
            _measure_alone(BenchModel(n, settings.widths(n)), settings) for n in settings.models
        ]


def _measure_alone(problem: BenchModel, settings: Settings) -> FsdpResult:
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
        timings, _ = take_turns(turns, control, settings.alone_rounds)
        return FsdpResult(problem.name, 1, timings)


def _spec(role: str, network: RatedNetwork, rail: int) -> GroupSpec:
    # One worker thread makes a communicator a queue, which is what NCCL's are.
    options = CommOptions(threads=1, interface=network.interfaces[rail], strict=True)
    return GroupSpec("dp", role, options)


def _measure(
    problem: BenchModel,
    settings: Settings,
    link: LinkRate,
    network: RatedNetwork,
    control: Collectives,
    groups: Mapping[str, Group],
) -> FsdpResult:
    def maker(form: Form) -> Maker:
        return lambda: make(form, problem, groups)

    makers: dict[str, Maker] = {UNSHARDED: lambda: Unsharded(problem)}
    makers |= {form.name: maker(form) for form in settings.chosen_forms()}
    reference = Reference.of(problem, control)
    # Memory does not depend on the rate; a batch of one row has none to speak of.
    counts = can_count() and link == settings.links[0]
    trainings, peaks = _build(makers, problem, control, reference, counts)
    expected = squared_norm(list(reference.exact.values()))
    turns = {
        case: _turn(training, problem, control, None if case == UNSHARDED else expected)
        for case, training in trainings.items()
    }
    turns |= _collectives_alone(problem, groups, turns[UNSHARDED])
    timings, sent = take_turns(turns, control, settings.rounds)
    forward_s = min(
        _forward_s(trainings[UNSHARDED], problem, control) for _ in range(settings.rounds)
    )
    backward_s = max(0.0, timings[UNSHARDED].fastest_us / 1e6 - forward_s)
    steps = {
        case: StepWork(
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
    prediction = _predict(trainings, steps, turns, timings, settings, network, control)
    return FsdpResult(
        problem.name, control.size, timings, sent, peaks, steps, bounds, prediction, link
    )


def _build(
    makers: Mapping[str, Maker],
    problem: BenchModel,
    control: Collectives,
    reference: Reference,
    counts_memory: bool,
) -> tuple[dict[str, Training], dict[str, int]]:
    """Make and check every training, and find its peak of memory on the way."""
    trainings, peaks = {}, {}
    one_row = problem.batch(control.rank, rows=1)

    def steps(training: Training) -> None:
        for _ in range(_WARM_STEPS):
            training.forget_gradients()
            run_step(training, problem, one_row)

    for names in (THEIRS, OURS) if counts_memory else ():
        # What the first of a kind leaves behind for good is not the next one's memory.
        for case in [name for name in names if name in makers][:1]:
            steps(makers[case]())
    for case, make_training in makers.items():
        gc.collect()
        base = in_use_bytes() if counts_memory else 0
        training = trainings[case] = make_training()
        steps(training)
        if counts_memory:
            own = peak_bytes(lambda training=training: steps(training), base)  # type: ignore[misc]
            peaks[case] = int(control.all_reduce(torch.tensor([own]), op="max"))
        if case != UNSHARDED:
            _check(case, training, problem, control, reference)
    return trainings, peaks


def _check(
    case: str, training: Training, problem: BenchModel, control: Collectives, reference: Reference
) -> None:
    """Compare the gradients of a step with those that it must have. Collective."""
    for _ in range(1 if control.size > 1 else _WARM_STEPS):
        training.forget_gradients()
        run_step(training, problem, problem.batch(control.rank))
    try:
        reference.check(training.whole_gradients())
    except AssertionError as difference:
        raise AssertionError(f"{case}: {difference}") from difference


def _turn(
    training: Training, problem: BenchModel, control: Collectives, expected: Tensor | None = None
) -> Turn:
    batch = problem.batch(control.rank)

    def run() -> None:
        run_step(training, problem, batch)

    def check() -> None:
        if expected is not None:
            # Each rank has a shard of the same gradients.
            norm = control.all_reduce(squared_norm(training.shard_gradients()))
            torch.testing.assert_close(norm, expected, rtol=_NORM_TOLERANCE, atol=0.0)

    return Turn(run, training.forget_gradients, check)


def _collectives_alone(
    problem: BenchModel, groups: Mapping[str, Group], computing: Turn
) -> dict[str, Turn]:
    """All units once, one after another: with nothing beside it, and beside a step that computes.

    What the step takes longer beside them is the time of the processor that they take from it.
    """
    gathers, reduces = (groups[role].collectives for role in ("gather", "reduce"))
    size = gathers.size
    lengths = [num_bytes // 4 // size * size for num_bytes in problem.unit_bytes()]
    wholes = [torch.zeros(length) for length in lengths]
    shards = [torch.zeros(length // size) for length in lengths]
    pairs = list(zip(wholes, shards, strict=True))
    gathered = [torch.zeros(length) for length in lengths]

    def gather() -> None:
        for whole, shard in pairs:
            gathers.all_gather(shard, out=whole)

    def reduce() -> None:
        for whole, shard in pairs:
            gathers.reduce_scatter(whole, out=shard)

    def beside() -> None:
        pending = [reduces.reduce_scatter_async(whole) for whole in wholes]
        pending += [
            gathers.all_gather_async(shard, out=whole)
            for shard, whole in zip(shards, gathered, strict=True)
        ]
        computing.run()
        for one in pending:
            one.wait()

    turns = {GATHER: Turn(gather), REDUCE: Turn(reduce)}
    return turns | {BESIDE: Turn(beside, computing.prepare)}


def _predict(
    trainings: Mapping[str, Training],
    steps: Mapping[str, StepWork],
    turns: Mapping[str, Turn],
    timings: Mapping[str, Timing],
    settings: Settings,
    network: RatedNetwork,
    control: Collectives,
) -> Prediction | None:
    """Times of our cases in the simulator, if units compute as they do in the first of them.

    Neither that step nor any other enters as a whole, but what units compute in it, and
    collectives that were timed alone. Those are between pairs, so a form without is left out.
    Collective.
    """
    sharded = {
        case: training.sharded
        for case, training in trainings.items()
        if isinstance(training, Sharding) and case != NO_PAIRS
    }
    if not sharded:
        return None
    case, model = next(iter(sharded.items()))

    def run() -> None:
        turns[case].prepare()
        control.all_reduce(torch.zeros(1))
        turns[case].run()

    costs = recorded_costs(model, run, settings.rounds, control)
    step = steps[case]
    latency_s = latency_of(
        (timings[GATHER].median_us + timings[REDUCE].median_us) / 1e6,
        # A unit sends as much to gather it as to reduce it.
        num_bytes=2 * step.reduce_bytes(),
        num_operations=2 * len(step.unit_bytes),
        bytes_per_s=network.bytes_per_s,
    )
    return predict(sharded, costs, bytes_per_s=network.bytes_per_s, latency_s=latency_s)


def _forward_s(training: Training, problem: BenchModel, control: Collectives) -> float:
    batch = problem.batch(control.rank)
    control.all_reduce(torch.zeros(1))

    def run() -> None:
        problem.loss(training.model, batch)

    return seconds_of(run, control)


def nothing() -> None:
    """Does nothing, for a turn that has nothing to prepare or to check."""


@dataclass(frozen=True)
class Turn:
    """A case, and what goes before and after it outside of its time.

    Args:
        run: Called, and timed.
        prepare: Called before.
        check: Called after; raises where the result is wrong.
    """

    run: Callable[[], None]
    prepare: Callable[[], None] = nothing
    check: Callable[[], None] = nothing


def take_turns(
    turns: Mapping[str, Turn], control: Collectives, rounds: int
) -> tuple[dict[str, Timing], dict[str, float]]:
    """In each round every case once. Collective; the same result on every rank.

    Args:
        turns: The cases, by name.
        control: Ranks meet through it before each turn, and exchange their times.
        rounds: Number of turns of each case; one round more goes before and does not count.

    Returns:
        Times of each case, and the bytes that the rank which sent most has sent in a turn of it,
        with all headers, as the mean over the rounds.
    """
    sent: dict[str, list[float]] = {case: [] for case in turns}

    def turn(case: str) -> float:
        turns[case].prepare()
        control.all_reduce(torch.zeros(1))
        before = _sent_bytes()
        seconds = seconds_of(turns[case].run, control)
        turns[case].check()
        sent[case].append(_sent_bytes() - before)
        return seconds * 1e6

    timings = in_turns({case: partial(turn, case) for case in turns}, rounds)
    # Without the round that does not count.
    means = torch.tensor([sum(sent[case][1:]) / rounds for case in turns], dtype=torch.float64)
    most = control.all_reduce(means, op="max").tolist()
    return timings, dict(zip(turns, most, strict=True))


def seconds_of(run: Callable[[], None], control: Collectives) -> float:
    """Seconds that the slowest rank takes. Collective."""
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(control.all_reduce(taken, op="max"))


def _sent_bytes() -> int:
    """Bytes that this rank's links have sent, on all rails together."""
    return sum(found.sent_bytes for name, found in traffic().items() if name != "lo")


_PERIOD_S = 2e-4


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library, 2.33 or newer."""

    _names_ = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names_.split()]


def can_count() -> bool:
    """True if this process's C library tells."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def in_use_bytes() -> int:
    """Bytes of all blocks in use, mapped ones included. Local."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallInfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def peak_bytes(run: Callable[[], object], base_bytes: int) -> int:
    """The most that is in use while `run` runs, above `base_bytes`; looked at every 0.2 ms."""
    found = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            found[0] = max(found[0], in_use_bytes())
            time.sleep(_PERIOD_S)

    gc.collect()
    watcher = threading.Thread(target=watch, name="memory", daemon=True)
    watcher.start()
    try:
        run()
    finally:
        is_over.set()
        watcher.join()
    return found[0] - base_bytes
