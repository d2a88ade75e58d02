"""What is measured: each form of the exchange on the ranks, their link, and how plans are made."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from core_bench.runner import Timing, seconds_together, take_turns, time_cases
from gdn_cp_bench.exchange_case import SPEC, CaseTensors, ExchangeCase
from gdn_cp_bench.forms import FORMS, build_form, obstacle, plan_of
from gdn_cp_bench.settings import HIDDEN_DIM, PackCase, Settings, random_lengths
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.process.world import connect
from pcomm.core.topology import Topology
from pcomm.gdn_cp.plan import make_plan
from pcomm.gdn_cp.strategies.choice import Link
from pcomm.gdn_cp.strategies.strategy import StrategyName


@dataclass(frozen=True)
class Counted:
    """What one layer sends.

    Args:
        forward: Number of collectives of forward.
        backward: Number of collectives of backward.
        sent_bytes: Bytes, both ways, of the rank that sends most.
        seconds: Duration of one run on the slowest rank.
    """

    forward: int
    backward: int
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class OfPack:
    """Results of one pack.

    Args:
        pack: The sequences.
        counted: Collectives and bytes of each form.
        timings: Duration of each form that was timed.
        left_out: Reason why each other form was not timed.
        imbalance: Tokens of the busiest rank over the average, less 1, with strategy `docs`.
        auto: The strategy that a plan takes by itself, for the link that was measured.
    """

    pack: PackCase
    counted: dict[str, Counted]
    timings: dict[str, Timing]
    left_out: dict[str, str]
    imbalance: float
    auto: str


@dataclass(frozen=True)
class OfSize:
    """Results of one number of ranks.

    Args:
        size: Number of ranks.
        link: Measured latency and bandwidth of an all-to-all.
        packs: Results of each pack.
    """

    size: int
    link: Link
    packs: list[OfPack]


def measure_on_rank(settings: Settings) -> OfSize:
    """All packs on the ranks of this world. Collective; the same times on every rank."""
    with connect(backend="gloo") as world:
        topology = Topology({"cp": world.size})
        with open_groups(topology, ["cp"], backend="gloo") as groups:
            collectives = groups["cp"].collectives
            link = measure_link(collectives)
            packs = []
            for pack in settings.packs():
                if world.rank == 0:
                    # It takes minutes, and results go to stdout.
                    print(f"cp {world.size}: {pack.label} ...", file=sys.stderr, flush=True)
                packs.append(_measure_pack(pack, settings, collectives, link))
            return OfSize(world.size, link, packs)


def _measure_pack(
    pack: PackCase, settings: Settings, collectives: Collectives, link: Link
) -> OfPack:
    numbers = CaseTensors(pack.cu_seqlens, collectives.rank, collectives.size)
    reasons = {name: obstacle(name, pack, collectives) for name in FORMS}
    left_out = {name: why for name, why in reasons.items() if why}
    names = [name for name in FORMS if name not in left_out]
    counted = {name: check_and_count(name, numbers, collectives) for name in names}
    built = {name: build_form(name, numbers, collectives) for name in names}
    cases = {name: case for name, case in built.items() if case is not None}
    left_out |= {name: "nothing goes on on another rank" for name in built if name not in cases}
    timings = time_together(
        cases,
        collectives,
        rounds=settings.rounds,
        seconds=settings.seconds,
        first={name: counted[name].seconds for name in cases},
    )
    chosen = make_plan(
        pack.cu_seqlens, collectives, SPEC, hidden_dim=HIDDEN_DIM, element_bytes=4, link=link
    )
    imbalance = plan_of(pack.cu_seqlens, collectives, "docs").imbalance(SPEC)
    return OfPack(pack, counted, timings, left_out, imbalance, chosen.strategy_of(SPEC))


def check_and_count(name: str, numbers: CaseTensors, collectives: Collectives) -> Counted:
    """Run a form once, compare all that it returns, and count what it sends. Collective.

    Raises:
        AssertionError: A rank got something else; on all ranks.
    """
    spy = SpyCollectives(collectives)
    case = build_form(name, numbers, spy)
    if case is None:
        return Counted(0, 0, 0, 0.0)
    start = time.perf_counter()
    outputs = case.forward()
    forward = len(spy.calls)
    found = (*outputs, *case.backward(outputs))
    seconds = time.perf_counter() - start
    wrong = case.differs(found)
    # All ranks stop together: the next form is collective as well.
    is_wrong = bool(collectives.all_reduce(torch.tensor([int(bool(wrong))]), op="max"))
    if is_wrong:
        what = wrong or "another rank is wrong"
        raise AssertionError(f"{name}, {len(numbers.cu_seqlens) - 1} sequences: {what}")
    worst = torch.tensor([spy.sent_bytes, seconds], dtype=torch.float64)
    sent_bytes, seconds = collectives.all_reduce(worst, op="max").tolist()
    return Counted(forward, len(spy.calls) - forward, int(sent_bytes), seconds)


_FEWEST = 3


def time_together(
    cases: Mapping[str, ExchangeCase],
    collectives: Collectives,
    *,
    rounds: int,
    seconds: float,
    first: Mapping[str, float],
) -> dict[str, Timing]:
    """In each round every case once. Collective; the same result on every rank.

    One round goes before and does not count, but for cases that would take more than `seconds`;
    those also have a turn only in the first rounds, at least in 3.

    Args:
        cases: Calls to time, by name, in the same order on every rank.
        collectives: The group's collectives.
        rounds: Number of rounds that count.
        seconds: Time limit of a case, which sets its number of rounds.
        first: Seconds that each took when it ran before, the same on every rank.
    """
    fewer = {
        name: min(rounds, max(_FEWEST, int(seconds / max(first[name], 1e-9)))) for name in cases
    }

    def turn(case: ExchangeCase) -> float:
        return seconds_together(case.run, collectives) * 1e6

    return take_turns({n: partial(turn, case) for n, case in cases.items()}, rounds, fewer=fewer)


_SMALL, _LARGE = 1 << 10, 1 << 23
_TIMES = 15


def measure_link(collectives: Collectives) -> Link:
    """The median time of a small all-to-all, and what a large one takes more. Collective."""
    small, large = (_seconds(collectives, size) for size in (_SMALL, _LARGE))
    share = (collectives.size - 1) / collectives.size
    more = max(large - small, 1e-9)
    return Link(small * 1e6, (_LARGE - _SMALL) * share / more / 1e9)


def _seconds(collectives: Collectives, num_bytes: int) -> float:
    x = torch.zeros(num_bytes // 4)
    return statistics.median(
        seconds_together(lambda: collectives.all_to_all(x), collectives) for _ in range(_TIMES)
    )


STRATEGIES: tuple[Literal["auto"] | StrategyName, ...] = ("heads", "docs", "state", "auto")
_SIZES = (2, 4, 8)
_PACKS = {64: 8192, 1000: 65536}


class PlanTime(NamedTuple):
    """One row: how long it took to make a plan.

    Args:
        strategy: Strategy of the plan.
        size: Number of ranks it is for.
        num_sequences: Number of sequences of the pack, of random lengths.
        timing: Duration of one call, in time of this thread.
    """

    strategy: str
    size: int
    num_sequences: int
    timing: Timing


def time_plans(rounds: int = 15) -> list[PlanTime]:
    """Every strategy, packs of 64 and 1,000 sequences, 2, 4 and 8 ranks. Local, one thread."""
    torch.set_num_threads(1)
    found = []
    for count, num_tokens in _PACKS.items():
        for size in _SIZES:
            lengths = random_lengths(count, num_tokens, 2 * size)
            offsets = tuple(accumulate(lengths, initial=0))
            cases: dict[str, Callable[[], object]] = {
                strategy: partial(_make, offsets, size, strategy) for strategy in STRATEGIES
            }
            timings = time_cases(cases, rounds=rounds, round_s=0.0, clock=time.thread_time)
            found += [PlanTime(strategy, size, count, timings[strategy]) for strategy in STRATEGIES]
    return found


def _make(offsets: tuple[int, ...], size: int, strategy: Literal["auto"] | StrategyName) -> object:
    plan = make_plan(offsets, (size - 1, size), SPEC, strategy=strategy, hidden_dim=2048)
    return plan.prepare("cpu")
