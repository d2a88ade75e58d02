"""What the cost model of `pcomm plan` says of the exchanges of a Gated DeltaNet layer, and they.

    FILE=docs/benchmarks/forecast.csv
    python integration/benchmarks/plan_beside_gdn_cp.py 2x2000 1,16 --csv $FILE

Measures forms of `pcomm bench gdn-cp` on links of a known rate (needs root), at one place at a
time: so many ranks, links of so many Mbit/s, packs of so many sequences. The rows of other places
stay in the file. The machine is calibrated in the same run:

    computing  the same form with collectives that answer at once, on all ranks together, in the
               same rounds
    link       all-to-alls of 1 KiB and of 8 MiB and all-gathers of 8 MiB, alone, in the same
               rounds: gloo's all-to-all is not between pairs, and is slower

Then each form is counted on tensors without memory, and predicted from these, at the rate of the
operation that sends most of its bytes; reduce-scatters go as all-gathers do.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from core_bench.rated_network import RatedNetwork, rated_network
from core_bench.rows import Row, row, save_places
from core_bench.runner import seconds_together, take_turns
from core_bench.tables import lines_of
from gdn_cp_bench.exchange_case import CaseTensors
from gdn_cp_bench.forms import build_form, obstacle
from gdn_cp_bench.measure import check_and_count
from gdn_cp_bench.settings import PackCase, Settings
from pcomm.core import CommOptions, GroupSpec, Topology, connect, open_groups, run_local
from pcomm.core.collectives import Collectives
from pcomm.integration.forecast.counted_step import CountedStep, StepCounter
from pcomm.integration.forecast.lone_rank import LoneCollectives, Sent
from pcomm.integration.forecast.machine import Machine, predict_step

NAME = "plan_beside_gdn_cp"
FORMS = ("fused", "heads", "docs", "state", "gather")
ROUNDS = 11
ALONE = "without sending"
SMALL, LARGE, GATHER = "all-to-all of 1 KiB", "all-to-all of 8 MiB", "all-gather of 8 MiB"
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 23


def measure(settings: Settings, network: RatedNetwork) -> dict[str, float]:
    """Milliseconds of each form of each pack, of its computing and of the link. Collective."""
    with connect(backend="gloo") as world:
        topology = Topology({"cp": world.size})
        options = CommOptions(threads=1, interface=network.interfaces[0], strict=True)
        with (
            network.inside(world.rank),
            open_groups(topology, [GroupSpec("cp", "", options)]) as groups,
        ):
            group = groups["cp"]
            lone = LoneCollectives(group, lambda sent: lambda: None, group.collectives.rank)
            found: dict[str, float] = {}
            for pack in packs_of(settings):
                found |= _measure_pack(pack, group.collectives, lone)
    return found


def packs_of(settings: Settings) -> list[PackCase]:
    """Packs of random lengths."""
    return [pack for pack in settings.packs() if pack.is_random]


def _measure_pack(
    pack: PackCase, collectives: Collectives, lone: LoneCollectives
) -> dict[str, float]:
    numbers = CaseTensors(pack.cu_seqlens, collectives.rank, collectives.size)
    turns = {f"{name}, {pack.label}": one for name, one in _link_turns(collectives).items()}
    for name in FORMS:
        if obstacle(name, pack, collectives):
            continue
        check_and_count(name, numbers, collectives)
        built = build_form(name, numbers, collectives), build_form(name, numbers, lone)
        for case, what in zip(built, (name, f"{name} {ALONE}"), strict=True):
            if case is not None:
                turns[f"{what}, {pack.label}"] = partial(_turn, case.run, collectives)
    timings = take_turns(turns, ROUNDS)
    return {case: timing.median_us / 1e3 for case, timing in timings.items()}


def _turn(run: object, collectives: Collectives) -> float:
    return seconds_together(run, collectives) * 1e6  # type: ignore[arg-type]


def _link_turns(collectives: Collectives) -> dict[str, Callable[[], float]]:
    small, large = (torch.zeros(size // 4) for size in (SMALL_BYTES, LARGE_BYTES))
    shard = large[: len(large) // collectives.size].clone()
    runs = {
        SMALL: partial(collectives.all_to_all, small),
        LARGE: partial(collectives.all_to_all, large),
        GATHER: partial(collectives.all_gather, shard),
    }
    return {name: partial(_turn, run, collectives) for name, run in runs.items()}


def counted(name: str, pack: PackCase, num_ranks: int) -> CountedStep:
    """A form on the first of so many ranks."""
    counter = StepCounter()
    group = counter.open_groups(Topology({"cp": num_ranks}), ["cp"])["cp"]
    with counter.counting():
        numbers = CaseTensors(pack.cu_seqlens, 0, num_ranks)
        case = build_form(name, numbers, group.collectives)
        assert case is not None
        counter.begin()
        case.run()
        return counter.counted([], [])


def predicted_ms(
    found: Mapping[str, float], settings: Settings, num_ranks: int
) -> dict[str, float]:
    """Each form of each pack that was measured, from the calibration."""
    predicted = {}
    for pack in packs_of(settings):
        for name in FORMS:
            computing_ms = found.get(f"{name} {ALONE}, {pack.label}")
            if computing_ms is None:
                continue
            step = counted(name, pack, num_ranks)
            machine = machine_of(found, pack, step, num_ranks)
            slower = computing_ms * 1e-3 / predict_step(step, machine, num_ranks).computing_s
            machine = replace(machine, memory_gb_per_s=machine.memory_gb_per_s / slower)
            case = f"{name}, {pack.label}"
            predicted[case] = predict_step(step, machine, num_ranks).seconds * 1e3
    return predicted


def machine_of(
    found: Mapping[str, float], pack: PackCase, step: CountedStep, num_ranks: int
) -> Machine:
    """The machine in the rounds of a pack, which moves 1 GB a second until a form tells more."""
    small, large, gather = (found[f"{name}, {pack.label}"] for name in (SMALL, LARGE, GATHER))
    sent = [one for one in step.events if isinstance(one, Sent)]
    most = max(sent, key=lambda one: one.sent_bytes).operation
    beyond = (LARGE_BYTES - SMALL_BYTES) / (large - small)
    per_ms = beyond if most == "all_to_all" else LARGE_BYTES / gather
    gb_per_s = per_ms * (num_ranks - 1) / num_ranks / 1e6
    # A collective has its latency once here, however many steps a ring has.
    us = small * 1e3 / (num_ranks - 1)
    return Machine(
        ranks_per_host=num_ranks,
        memory_gib=1.0,
        fp32_tflops=1e6,
        bf16_tflops=1e6,
        memory_gb_per_s=1.0,
        link_gb_per_s=gb_per_s,
        link_us=us,
        network_gb_per_s=gb_per_s,
        network_us=us,
    )


def rows_at(num_ranks: int, mbit_per_s: float, sequences: Sequence[int]) -> Sequence[Row]:
    """What was measured at a place, and beside it what was predicted."""
    settings = Settings(ranks=(num_ranks,), sequences=tuple(sequences))
    place = f"cp {num_ranks}, {mbit_per_s:g} Mbit/s"
    with rated_network(num_ranks, num_rails=1, mbit_per_s=mbit_per_s) as network:
        found = run_local(measure, num_ranks, (settings, network), threads=1)[0]
    rows = [row(NAME, f"{case} @ {place}", value, "ms", ROUNDS) for case, value in found.items()]
    for case, value in predicted_ms(found, settings, num_ranks).items():
        beside = f"{case} @ {place}", value / found[case]
        rows.append(row(NAME, f"{case} @ {place}", value, "ms, predicted", beside=beside))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", help="ranks and Mbit/s: 2x2000")
    parser.add_argument("sequences", help="sequences of each pack: 1,16")
    parser.add_argument("--csv", type=Path, help="file whose rows of this place are replaced")
    arguments = parser.parse_args()
    num_ranks, mbit = map(int, arguments.place.split("x"))
    sequences = [int(word) for word in re.findall(r"\d+", arguments.sequences)]
    rows = list(rows_at(num_ranks, mbit, sequences))
    print("\n".join(lines_of(rows)))
    if arguments.csv is not None:
        save_places(arguments.csv, rows)


if __name__ == "__main__":
    main()
