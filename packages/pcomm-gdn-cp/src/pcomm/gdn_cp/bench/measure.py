"""Everything that is measured on one context-parallel size: called on each of its ranks."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.collectives.spy import SpyCollectives
from pcomm.core.groups.groups import open_groups
from pcomm.core.process.world import connect
from pcomm.core.testing.timing import Timing
from pcomm.core.topology import Topology
from pcomm.gdn_cp.bench.exchange_case import Numbers
from pcomm.gdn_cp.bench.forms import FORMS, build_form, obstacle
from pcomm.gdn_cp.bench.measured_link import measure_link
from pcomm.gdn_cp.bench.planned_forms import plan_of
from pcomm.gdn_cp.bench.rounds import time_together
from pcomm.gdn_cp.bench.settings import HIDDEN_DIM, SPEC, Pack, Settings
from pcomm.gdn_cp.plan import make_plan
from pcomm.gdn_cp.strategies.cost import Link

__all__ = ["Counted", "OfPack", "OfSize", "check_and_count", "measure_on_rank"]


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

    pack: Pack
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


def _measure_pack(pack: Pack, settings: Settings, collectives: Collectives, link: Link) -> OfPack:
    numbers = Numbers(pack.cu_seqlens, collectives.rank, collectives.size)
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


def check_and_count(name: str, numbers: Numbers, collectives: Collectives) -> Counted:
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
