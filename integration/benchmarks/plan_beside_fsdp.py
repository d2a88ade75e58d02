"""What the cost model of `pcomm plan` says of sharded steps, beside those steps in the same run.

    FILE=docs/benchmarks/forecast.csv
    python integration/benchmarks/plan_beside_fsdp.py 2x400 linear --csv $FILE

Measures forms of `pcomm.fsdp` on one rail as `pcomm bench fsdp` does (needs root), at one place at
a time: so many ranks, links of so many Mbit/s (and times the batch), a model. The rows of other
places stay in the file. In the same rounds the machine is calibrated, with no sharded step:

    computing  a step of the model in one process, where as many ranks compute at once; how fast
               it moves numbers beside how fast it multiplies them is that of one rank alone
    processor  what that step takes longer beside all-gathers and reduce-scatters
    latency    what those take alone, beyond their bytes

The C library of the ranks keeps memory that was freed, as an allocator of GPUs does: else what is
gathered and released again comes anew from the system, page by page, which no model knows of.

Then each form is counted on tensors without memory, as a layout is, and predicted from these three
and the rate of the link.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from torch import nn

from core_bench.rated_network import rated_network
from core_bench.rows import Row, row, save_places
from core_bench.tables import lines_of
from fsdp_bench.measure import BESIDE, GATHER, REDUCE, measure_on_rank
from fsdp_bench.settings import FORMS, UNSHARDED, LinkRate, OurForm, Settings, place_of
from fsdp_bench.trainings import BenchModel, Unsharded, make, run_step
from pcomm.core import Topology, run_local
from pcomm.integration.forecast.counted_step import CountedStep, StepCounter
from pcomm.integration.forecast.machine import Machine, measured_machine, predict_step

NAME = "plan_beside_fsdp"
ROUNDS = 7
OURS = [one for one in FORMS if isinstance(one, OurForm) and one.has_pairs]
ON_ONE_RAIL = [one for one in OURS if one.reduce_on != "other rail"]
KEEPS_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
MULTIPLIES, MOVES = "product alone", "SiLU alone"


def counted(form: OurForm | None, problem: BenchModel, num_ranks: int) -> CountedStep:
    """A step of a form, or of the model without shards, after those that record it."""
    counter = StepCounter()
    groups = counter.open_groups(Topology({"dp": num_ranks}), [("dp", "gather"), ("dp", "reduce")])
    # The model is in fp32 already, and parameters without memory cannot be exchanged.
    as_it_is = mock.patch.object(nn.Module, "to", lambda module, *_: module)
    with counter.counting(), as_it_is:
        own = {key: groups["dp", key] for key in ("gather", "reduce")}
        training = Unsharded(problem) if form is None else make(form, problem, own)
        batch = problem.batch(0)
        for _ in range(3):
            training.forget_gradients()
            counter.begin()
            run_step(training, problem, batch)
        return counter.counted(list(training.model.parameters()), [])


def machine_of(
    found: Mapping[str, float], problem: BenchModel, num_ranks: int, link: LinkRate
) -> Machine:
    """The machine of a place, as far as a step asks for it."""
    unit_bytes = problem.unit_bytes()
    # Of a gather, or of a reduce, of all units.
    sent = sum(unit_bytes) * (num_ranks - 1) / num_ranks
    taken_s = (found[BESIDE] - found[UNSHARDED]) * 1e-3
    alone_s = (found[GATHER] + found[REDUCE]) * 1e-3
    beyond_s = max(0.0, alone_s - max(taken_s, 2 * sent / link.bytes_per_s)) / len(unit_bytes) / 2
    between = {"gb_per_s": link.bytes_per_s / 1e9, "us": beyond_s * 1e6 / (num_ranks - 1)}
    machine = Machine(
        ranks_per_host=num_ranks,
        memory_gib=1.0,
        fp32_tflops=found[MULTIPLIES],
        bf16_tflops=found[MULTIPLIES],
        memory_gb_per_s=found[MOVES],
        socket_gb_per_s=2 * sent / max(taken_s, 1e-9) / 1e9,
        **{f"{name}_{key}": x for name in ("link", "network") for key, x in between.items()},
    )
    alone = predict_step(counted(None, problem, num_ranks), machine, num_ranks).seconds
    faster = alone / (found[UNSHARDED] * 1e-3)
    rates = ("fp32_tflops", "bf16_tflops", "memory_gb_per_s")
    return replace(machine, **{name: getattr(machine, name) * faster for name in rates})


def predicted_ms(
    found: Mapping[str, float], model: str, num_ranks: int, link: LinkRate
) -> dict[str, float]:
    """The step of each form, by its name, from the calibration."""
    problem = BenchModel(model, Settings().widths(model, link))
    machine = machine_of(found, problem, num_ranks, link)
    return {
        form.name: predict_step(counted(form, problem, num_ranks), machine, num_ranks).seconds * 1e3
        for form in ON_ONE_RAIL
    }


def rows_at(model: str, num_ranks: int, link: LinkRate) -> Sequence[Row]:
    """What was measured at a place, and beside it what was predicted."""
    settings = Settings(
        ranks=(num_ranks,),
        models=(model,),
        # Memory is counted on the first link alone, which is none of those that are measured.
        links=(LinkRate(1.0), link),
        forms=tuple(form.key for form in ON_ONE_RAIL),
        rounds=ROUNDS,
    )
    alone = measured_machine(os.cpu_count() or 1, settings.widths(model).width)
    os.environ |= KEEPS_FREED_MEMORY
    with rated_network(num_ranks, num_rails=2, mbit_per_s=link.mbit_per_s) as network:
        (found,) = run_local(measure_on_rank, num_ranks, (settings, link, network))[0]
    place = place_of(num_ranks, model, link)
    ms = {case: timing.median_us / 1e3 for case, timing in found.timings.items()}
    rows = [row(NAME, f"{case} @ {place}", value, "ms", ROUNDS) for case, value in ms.items()]
    rates = {MULTIPLIES: (alone.fp32_tflops, "TFLOP/s"), MOVES: (alone.memory_gb_per_s, "GB/s")}
    rows += [row(NAME, f"{case} @ {place}", *value) for case, value in rates.items()]
    ms |= {case: value for case, (value, _) in rates.items()}
    for case, value in predicted_ms(ms, model, num_ranks, link).items():
        beside = f"{case} @ {place}", value / ms[case]
        rows.append(row(NAME, f"{case} @ {place}", value, "ms, predicted", beside=beside))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", help="ranks, Mbit/s and times the batch: 2x400, 4x2000x4")
    parser.add_argument("model", help="linear or transformer")
    parser.add_argument("--csv", type=Path, help="file whose rows of this place are replaced")
    arguments = parser.parse_args()
    num_ranks, mbit, batch = map(int, re.findall(r"\d+", arguments.place + "x1")[:3])
    rows = list(rows_at(arguments.model, num_ranks, LinkRate(mbit, batch)))
    print("\n".join(lines_of(rows)))
    if arguments.csv is not None:
        save_places(arguments.csv, rows)


if __name__ == "__main__":
    main()
