"""`pcomm bench gdn-cp`: how to bring a layer's projections to its core and back, form by form.

Ranks are processes of this machine with one thread each, or those of torchrun; gloo moves fp32 on
the CPU, so only ratios of one run mean much. Every form is compared with the numbers of the whole
pack before it is timed.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING

from pcomm.core.command.bench.options import add_numbers, add_outputs, check_can_plot, numbers
from pcomm.core.command.bench.results import write_results
from pcomm.core.errors import ConfigError
from pcomm.gdn_cp.bench.settings import Settings

if TYPE_CHECKING:
    from pcomm.gdn_cp.bench.measure import OfSize
    from pcomm.gdn_cp.bench.plan_time import PlanTime

__all__ = ["GdnCpBenchmark", "command"]

_DEFAULT, _QUICK = Settings(), Settings(sequences=(1, 8), num_tokens=1024, rounds=3, seconds=1.0)


class GdnCpBenchmark:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "gdn-cp"
    help = "time the exchange of one Gated DeltaNet layer: four strategies and what they replace"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add_numbers(parser, "--ranks", "context-parallel sizes", _DEFAULT.ranks)
        add_numbers(parser, "--sequences", "sequences", _DEFAULT.sequences)
        add("--tokens", type=int, metavar="T", help=f"of a pack ({_DEFAULT.num_tokens})")
        add("--rounds", type=int, metavar="R", help=f"turns of each form ({_DEFAULT.rounds})")
        add("--no-plans", action="store_true", help="do not time how plans are made")
        add("--quick", action="store_true", help="small packs and few rounds: seconds, no figures")
        add_outputs(parser, picture="the times")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        settings = _settings(arguments, size)
        # torch is imported from here on.

        if arguments.plot is not None:
            check_can_plot("gdn-cp")
        sizes, plans = _measure(settings, is_launched=size > 1)
        if _is_first():
            _write(arguments, settings, sizes, plans)
        return 0


def _settings(arguments: argparse.Namespace, world_size: int) -> Settings:
    base = _QUICK if arguments.quick else _DEFAULT
    launched = (world_size,) if world_size > 1 else base.ranks
    ranks = launched if arguments.ranks is None else numbers("gdn-cp", "--ranks", arguments.ranks)
    if world_size > 1 and ranks != launched:
        raise ConfigError(
            f"pcomm bench gdn-cp --ranks {arguments.ranks}",
            found=f"{world_size} processes, started by torchrun",
            why="They are the ranks, and no others are started beside them.",
            fix="Leave --ranks out, or run without torchrun.",
        )
    sequences = arguments.sequences
    return Settings(
        ranks,
        base.sequences if sequences is None else numbers("gdn-cp", "--sequences", sequences),
        base.num_tokens if arguments.tokens is None else arguments.tokens,
        base.rounds if arguments.rounds is None else arguments.rounds,
        base.seconds,
        not arguments.no_plans,
    )


def _measure(settings: Settings, *, is_launched: bool) -> tuple[list[OfSize], list[PlanTime]]:
    from pcomm.core.process.local_ranks import run_local
    from pcomm.gdn_cp.bench.measure import measure_on_rank
    from pcomm.gdn_cp.bench.plan_time import time_plans

    if is_launched:
        sizes = [measure_on_rank(settings)]
        # One rank is enough, and others would take its cores.
        return sizes, time_plans() if settings.times_plans and _is_first() else []
    # Plans before ranks, in a process of their own: one thread, on a machine that is at rest.
    plans = run_local(time_plans, 1)[0] if settings.times_plans else []
    return [run_local(measure_on_rank, size, (settings,))[0] for size in settings.ranks], plans


def _write(
    arguments: argparse.Namespace,
    settings: Settings,
    sizes: list[OfSize],
    plans: list[PlanTime],
) -> None:
    from pcomm.gdn_cp.bench.plot import plot_times
    from pcomm.gdn_cp.bench.report import rows_of, tables_of

    print(tables_of(settings, sizes, plans))
    write_results(arguments, rows_of(sizes, plans), partial(plot_times, sizes))


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


command = GdnCpBenchmark()
