"""`pcomm bench nvls`: what the collectives cost, as far as the machine at hand can tell.

The parts `host` and `compile` need no GPU. `emulated` says whether the operations are right between
emulated ranks, without a time. `ranks` (under torchrun) and `one-gpu` need GPUs, and end with the
code 77 where there are none.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcomm.core.command.bench.options import add_numbers, given_numbers
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.nvls.bench.settings import PARTS, Settings

if TYPE_CHECKING:
    from pcomm.core.testing.timing import Row

__all__ = ["NvlsBenchmark", "command"]

_DEFAULT = Settings()
_QUICK = Settings(architectures=(90,), rounds=7, sizes=(1 << 16,))
_EMULATED_RANKS = (2, 4)


class NvlsBenchmark:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "nvls"
    help = "time launches and transfers of multicast collectives, and what their kernels take"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        shown = ",".join(_DEFAULT.parts)
        add("--parts", metavar="P,P", help=f"of {', '.join(PARTS)} ({shown})")
        add_numbers(parser, "--sizes", "bytes of whole tensors", _DEFAULT.sizes, metavar="B,B")
        add("--rounds", type=int, metavar="R", help=f"rounds of each case ({_DEFAULT.rounds})")
        add("--quick", action="store_true", help="one architecture and few rounds: no figures")
        add("--csv", type=Path, metavar="FILE", help="replace the rows of these parts there")
        add("--tune", type=Path, metavar="FILE", help="write a table from the times of `ranks`")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print rows, and write what was asked for."""
        settings = _settings(arguments)
        if arguments.tune is not None and "ranks" not in settings.parts:
            raise ConfigError(
                "pcomm bench nvls --tune",
                found=f"the parts {','.join(settings.parts)}",
                why="Thresholds come from the times of transfers.",
                fix="Add --parts ranks, under torchrun.",
            )
        # torch is imported from here on.
        from pcomm.core.testing.timing import NOT_HERE, save_rows
        from pcomm.nvls.bench.report import lines_of

        rows: list[Row] = []
        for part in settings.parts:
            try:
                found = _measure(part, settings, arguments.tune)
            except UnsupportedError as error:
                print(f"UnsupportedError: {error}", file=sys.stderr)
                return NOT_HERE
            print("\n".join(lines_of(found)))
            rows += found
        if arguments.csv is not None and rows:
            save_rows(arguments.csv, rows)
            print(f"rows: {arguments.csv}")
        return 0


def _measure(part: str, settings: Settings, table: Path | None) -> list[Row]:
    """The rows of one part; that of emulated ranks prints a line for each number of them."""
    from pcomm.nvls.bench import report

    match part:
        case "host":
            from pcomm.nvls.bench.host import time_host

            return report.host_rows(time_host(world=settings.world, rounds=settings.rounds))
        case "compile":
            from pcomm.nvls.bench.builds import builds

            made = builds(world=settings.world, architectures=settings.architectures)
            return report.build_rows(list(made))
        case "emulated":
            from pcomm.nvls.bench.emulated import check_emulated

            for world in _EMULATED_RANKS:
                print(check_emulated(world))
            return []
        case "one-gpu":
            from pcomm.nvls.bench.one_gpu import measure_one_gpu

            return list(measure_one_gpu(size=settings.world))
    return _ranks(settings, table)


def _ranks(settings: Settings, path: Path | None) -> list[Row]:
    from pcomm.nvls.bench.ranks import measure_ranks
    from pcomm.nvls.bench.report import rank_rows
    from pcomm.nvls.bench.tune import tuned
    from pcomm.nvls.policy.table import Table

    times = list(measure_ranks(settings.sizes))
    import torch

    major, minor = torch.cuda.get_device_capability()
    architecture, device = f"sm_{major}{minor}", torch.cuda.get_device_name()
    if path is not None:
        old = Table.load(path) if path.exists() else Table.load()
        tuned(old, architecture, times, source=f"pcomm bench nvls, {device}").dump(path)
        print(f"table: {path}")
    return rank_rows(times, architecture)


def _settings(arguments: argparse.Namespace) -> Settings:
    base = _QUICK if arguments.quick else _DEFAULT
    changes: dict[str, Any] = {**given_numbers("nvls", arguments, ("sizes",))}
    if arguments.parts is not None:
        changes["parts"] = tuple(arguments.parts.split(","))
    if arguments.rounds is not None:
        changes["rounds"] = arguments.rounds
    return replace(base, **changes)


command = NvlsBenchmark()
