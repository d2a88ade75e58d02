"""`pcomm bench inference`: what a step of decoding costs beside what it must do.

Four questions: what does an operation cost that does nothing on one rank; what does the engine
take for a step without a model; how long is a step of a model in plain PyTorch beside its matrix
products alone; and how long are these with each form of the weights. Only ratios of one run mean
much on a machine that others use too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core_bench.runner import Benchmark, Results, check_counts, check_rounds, option
from inference_bench.pictures import PICTURES


@dataclass(frozen=True)
class Settings:
    streams: tuple[int, ...] = option((1, 8, 32), "texts at once")
    # For one stream, ascending.
    contexts: tuple[int, ...] = option((128, 512, 2048, 8192), "tokens of context", metavar="T,T")
    rows: tuple[int, ...] = option((1, 8, 64), "requests without a model")
    threads: tuple[int, ...] = option((1, 2), "threads of torch")
    rounds: int = option(31, "steps of each case", metavar="R")
    shapes: tuple[str, ...] = ("tiny", "SmolLM2-135M")
    # Tokens of each prompt where streams are measured.
    prompt: int = 64
    # Tokens whose products are measured with each form of the weights.
    product_rows: tuple[int, ...] = (1, 4, 8, 16, 64, 256)

    def __post_init__(self) -> None:
        options = ("streams", "contexts", "rows", "threads")
        check_counts("inference", {f"--{name}": getattr(self, name) for name in options})
        check_rounds("inference", self.rounds, fewest=7, better=31)


def _measure(settings: Settings) -> Results:
    from inference_bench.measure import measure
    from inference_bench.report import results_of

    return results_of(measure(settings))


_DEFAULT = Settings()
command = Benchmark(
    "inference",
    "time steps of decoding beside their matrix products",
    _DEFAULT,
    _measure,
    quick=replace(
        _DEFAULT,
        streams=(1, 8),
        contexts=(64, 256),
        rows=(1, 8),
        threads=(1,),
        rounds=7,
        shapes=("tiny",),
        product_rows=(1, 8),
    ),
    pictures=PICTURES,
)
