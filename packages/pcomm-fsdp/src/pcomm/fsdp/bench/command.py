"""`pcomm bench fsdp`: sharded training over rate-limited links, next to torch FSDP2.

Ranks are processes of this machine, each in a network namespace of its own, so it needs root on
Linux. Gradients are compared with those of one process before anything is timed, and in every step
that is. Only ratios of one run mean much.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pcomm.core.bench.options import check_can_plot, numbers
from pcomm.fsdp.bench.settings import MODELS, Settings

if TYPE_CHECKING:
    from pcomm.fsdp.bench.measure import Found

__all__ = ["FsdpBenchmark", "command"]

_DEFAULT = Settings()
_QUICK = Settings(ranks=(2,), rounds=3, alone_rounds=3, is_small=True)


class FsdpBenchmark:
    """See `pcomm.core.subcommands.Command`."""

    name = "fsdp"
    help = "time sharded training over rate-limited links, next to torch FSDP2 (needs root)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        ranks, models = ",".join(map(str, _DEFAULT.ranks)), ",".join(MODELS)
        add("--ranks", metavar="N,N", help=f"data-parallel sizes ({ranks})")
        add("--models", metavar="NAME,NAME", help=f"what is trained ({models})")
        add("--mbit", type=float, metavar="R", help=f"of each link ({_DEFAULT.mbit_per_s:g})")
        add("--rounds", type=int, metavar="R", help=f"turns of each case ({_DEFAULT.rounds})")
        add("--quick", action="store_true", help="tiny models, few rounds: seconds, no figures")
        add("--csv", type=Path, metavar="FILE", help="replace the rows of this benchmark there")
        add("--plot", type=Path, metavar="FILE", help="draw the times as a PNG")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print tables, and write what was asked for."""
        settings = _settings(arguments)
        # torch is imported from here on.
        from pcomm.core.testing.timing import save_rows
        from pcomm.fsdp.bench.plot import plot_times
        from pcomm.fsdp.bench.report import rows_of, tables_of

        if arguments.plot is not None:
            check_can_plot("fsdp")
        found = _measure(settings)
        print(tables_of(settings, found))
        if arguments.csv is not None:
            save_rows(arguments.csv, rows_of(found))
            print(f"rows: {arguments.csv}")
        if arguments.plot is not None:
            plot_times(found, arguments.plot)
            print(f"picture: {arguments.plot}")
        return 0


def _measure(settings: Settings) -> list[Found]:
    from pcomm.core.local_ranks import run_local
    from pcomm.core.testing.namespaces import rated_network
    from pcomm.fsdp.bench.measure import measure_alone, measure_on_rank

    found: list[Found] = []
    for size in settings.ranks:
        with rated_network(size, num_rails=2, mbit_per_s=settings.mbit_per_s) as network:
            found += run_local(measure_on_rank, size, (settings, network))[0]
    return [*run_local(measure_alone, 1, (settings,))[0], *found]


def _settings(arguments: argparse.Namespace) -> Settings:
    base = _QUICK if arguments.quick else _DEFAULT
    return Settings(
        base.ranks if arguments.ranks is None else numbers("fsdp", "--ranks", arguments.ranks),
        base.models if arguments.models is None else tuple(arguments.models.split(",")),
        base.mbit_per_s if arguments.mbit is None else arguments.mbit,
        base.rounds if arguments.rounds is None else arguments.rounds,
        base.alone_rounds,
        base.is_small,
    )


command = FsdpBenchmark()
