"""`pcomm bench nvls`: what the collectives cost, as far as the machine at hand can tell.

The parts `host` and `compile` need no GPU. `emulated` says whether the operations are right between
emulated ranks, without a time. `ranks` (under torchrun) and `one-gpu` need GPUs, and end with the
code 77 where there are none. Nothing here imports torch before a part runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from core_bench.rows import Row
from core_bench.runner import (
    NOT_HERE,
    Benchmark,
    Results,
    check_counts,
    check_parts,
    check_rounds,
    option,
)
from core_bench.tables import lines_of
from nvls_bench.pictures import PICTURES
from pcomm.core.errors import ConfigError, UnsupportedError

PARTS = ("host", "compile", "emulated", "ranks", "one-gpu")
_EMULATED_RANKS = (2, 4)


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...] = option(PARTS[:2], f"of {', '.join(PARTS)}", metavar="P,P")
    sizes: tuple[int, ...] = option(
        tuple(1 << power for power in range(13, 27)), "bytes of whole tensors", metavar="B,B"
    )
    rounds: int = option(101, "rounds of each case", metavar="R")
    tune: bool = option(False, "print bands of the table, from the times of `ranks`")
    # Ranks that launches and kernels are made for, without being there.
    world: int = 8
    # What kernels are compiled for, 90 for Hopper.
    architectures: tuple[int, ...] = (90, 100)

    def __post_init__(self) -> None:
        check_parts("nvls", self.parts, PARTS)
        check_counts("nvls", {"--sizes": self.sizes})
        check_rounds("nvls", self.rounds, fewest=7, better=101)
        if self.tune and "ranks" not in self.parts:
            raise ConfigError(
                "pcomm bench nvls --tune",
                found=f"the parts {','.join(self.parts)}",
                why="Thresholds come from the times of transfers.",
                fix="Add --parts ranks, under torchrun.",
            )


def _measure(settings: Settings) -> Results:
    rows: list[Row] = []
    for part in settings.parts:
        try:
            found = _rows(part, settings)
        except UnsupportedError as error:
            print(f"UnsupportedError: {error}", file=sys.stderr)
            return Results([], "", code=NOT_HERE)
        print("\n".join(lines_of(found)))
        rows += found
    return Results(rows, "")


def _rows(part: str, settings: Settings) -> list[Row]:
    """The rows of one part; that of emulated ranks prints a line for each number of them."""
    match part:
        case "host":
            from nvls_bench.on_host import host_rows, time_host

            return host_rows(time_host(world=settings.world, rounds=settings.rounds))
        case "compile":
            from nvls_bench.on_host import build_rows, builds

            made = builds(world=settings.world, architectures=settings.architectures)
            return build_rows(list(made))
        case "emulated":
            from nvls_bench.on_host import check_emulated

            for world in _EMULATED_RANKS:
                print(check_emulated(world))
            return []
        case "one-gpu":
            from nvls_bench.on_one_gpu import measure_one_gpu

            return list(measure_one_gpu(size=settings.world))
    return _ranks(settings)


def _ranks(settings: Settings) -> list[Row]:
    import torch

    from nvls_bench.between_gpus import measure_ranks, rank_rows, tuned_bands

    times = list(measure_ranks(settings.sizes))
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}"
    if settings.tune:
        source = f"pcomm bench nvls, {torch.cuda.get_device_name()}"
        for band in tuned_bands(architecture, times, source=source):
            print(f"{band!r},")
    return rank_rows(times, architecture)


_DEFAULT = Settings()
command = Benchmark(
    "nvls",
    "time launches and transfers of multicast collectives",
    _DEFAULT,
    _measure,
    quick=replace(_DEFAULT, architectures=(90,), rounds=7, sizes=(1 << 16,)),
    pictures=PICTURES,
)
