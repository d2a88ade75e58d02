"""`pcomm bench fsdp`: sharded training over rate-limited links, next to torch FSDP2.

Ranks are processes of this machine, each in a network namespace of its own, so it needs root on
Linux. Gradients are compared with those of one process before anything is timed, and in every step
that is. Only ratios of one run mean much.
"""

from __future__ import annotations

from dataclasses import replace

from core_bench.runner import Benchmark, Results
from fsdp_bench.pictures import PICTURES
from fsdp_bench.settings import LinkRate, Settings


def _measure(settings: Settings) -> Results:
    from core_bench.rated_network import rated_network
    from fsdp_bench.measure import FsdpResult, measure_alone, measure_on_rank
    from fsdp_bench.report import results_of
    from pcomm.core.process.local_ranks import run_local

    found: list[FsdpResult] = []
    for link in settings.links:
        for size in settings.ranks:
            with rated_network(size, num_rails=2, mbit_per_s=link.mbit_per_s) as network:
                found += run_local(measure_on_rank, size, (settings, link, network))[0]
    return results_of(settings, [*run_local(measure_alone, 1, (settings,))[0], *found])


_DEFAULT = Settings()
command = Benchmark(
    "fsdp",
    "time sharded training on rate-limited links beside FSDP2 (needs root)",
    _DEFAULT,
    _measure,
    quick=replace(
        _DEFAULT,
        ranks=(2,),
        links=(LinkRate(2000.0, 4),),
        rounds=3,
        alone_rounds=3,
        is_small=True,
    ),
    pictures=PICTURES,
)
