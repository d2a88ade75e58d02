"""`pcomm bench serving`: models as they are served, beside transformers and beside their kernels.

Tokens/s of streams, steps of a tiny model, decoding by the length of the context, prompts that are
cached or long, and what HTTP adds. Cases of a part take turns in one process; only ratios of one
run mean much on a machine that others use too.
"""

from __future__ import annotations

from core_bench.runner import Benchmark, Results
from serving_bench.pictures import PICTURES
from serving_bench.settings import QUICK, Settings


def _measure(settings: Settings) -> Results:
    from serving_bench.cases import measure
    from serving_bench.results import report_of, results_of

    measured = measure(settings)
    if settings.report is not None:
        settings.report.parent.mkdir(parents=True, exist_ok=True)
        settings.report.write_text(report_of(measured) + "\n")
    return results_of(measured)


command = Benchmark(
    "serving",
    "time models as they are served, beside transformers",
    Settings(),
    _measure,
    quick=QUICK,
    pictures=PICTURES,
)
