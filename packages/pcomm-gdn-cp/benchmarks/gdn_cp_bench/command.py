"""`pcomm bench gdn-cp`: how to bring a layer's projections to its core and back, form by form.

Ranks are processes of this machine with one thread each, or those of torchrun; gloo moves fp32 on
the CPU, so only ratios of one run mean much. Every form is compared with the numbers of the whole
pack before it is timed.
"""

from __future__ import annotations

import os
from dataclasses import replace

from core_bench.runner import Benchmark, Results
from gdn_cp_bench.pictures import PICTURES
from gdn_cp_bench.settings import Settings
from pcomm.core.errors import ConfigError


def _measure(settings: Settings) -> Results | None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and settings.ranks != (world_size,):
        raise ConfigError(
            f"pcomm bench gdn-cp --ranks {','.join(map(str, settings.ranks))}",
            found=f"{world_size} processes, started by torchrun",
            why="They are the ranks, and no others are started beside them.",
            fix="Leave --ranks out, or run without torchrun.",
        )
    from gdn_cp_bench.measure import measure_on_rank, time_plans
    from gdn_cp_bench.report import results_of
    from pcomm.core.process.local_ranks import run_local

    if world_size == 1:
        # Plans before ranks, in a process of their own: one thread, on a machine that is at rest.
        plans = [] if settings.no_plans else run_local(time_plans, 1)[0]
        sizes = [run_local(measure_on_rank, size, (settings,))[0] for size in settings.ranks]
        return results_of(settings, sizes, plans)
    sizes = [measure_on_rank(settings)]
    if os.environ.get("RANK", "0") != "0":
        return None
    # One rank is enough, and others would take its cores.
    return results_of(settings, sizes, [] if settings.no_plans else time_plans())


_DEFAULT = Settings()
command = Benchmark(
    "gdn-cp",
    "time the exchange of a Gated DeltaNet layer by strategy",
    _DEFAULT,
    _measure,
    quick=replace(_DEFAULT, sequences=(1, 8), tokens=1024, rounds=3, seconds=1.0),
    pictures=PICTURES,
)
