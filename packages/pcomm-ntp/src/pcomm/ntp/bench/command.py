"""`pcomm bench ntp`: what lost ranks cost a job, measured on CPU ranks or predicted for many GPUs.

`host` times plans of 100,800 ranks; `step` compares a step of a job that has lost a rank with one
of the whole job; `reshard` moves the state from one plan to another; `recovery` kills ranks.
`simulated` measures nothing: it predicts the throughput of large jobs by counting GPUs, and its
rows have a file of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcomm.core.command.bench.options import add_outputs, check_can_plot
from pcomm.core.command.bench.results import write_results
from pcomm.core.errors import ConfigError
from pcomm.ntp.bench.settings import PARTS, SIMULATED, Settings

if TYPE_CHECKING:
    from pcomm.core.testing.timing import Row
    from pcomm.ntp.bench.kills import Kill

__all__ = ["NtpBenchmark", "command"]

_DEFAULT = Settings()
_QUICK = Settings(rounds=7, kills=1, state_mib=4, placements=2)


class NtpBenchmark:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "ntp"
    help = "time steps, moves of state and recoveries with lost ranks; predict large jobs"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add("--parts", metavar="P,P", help=f"of {', '.join(PARTS)} ({','.join(_DEFAULT.parts)})")
        add("--rounds", type=int, metavar="R", help=f"rounds of each case ({_DEFAULT.rounds})")
        add("--kills", type=int, metavar="K", help=f"kills of a rank ({_DEFAULT.kills})")
        add("--quick", action="store_true", help="little state and few rounds: no figures")
        add_outputs(parser, rows="these parts", picture="the predictions of `simulated`")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure or predict, print rows, and write what was asked for."""
        settings = _settings(arguments)
        if arguments.plot is not None:
            if SIMULATED not in settings.parts:
                raise ConfigError(
                    "pcomm bench ntp --plot",
                    found=f"the parts {','.join(settings.parts)}",
                    why="The picture shows predictions.",
                    fix=f"Use --parts {SIMULATED}.",
                )
            check_can_plot("ntp")
        rows: list[Row] = []
        draw: Callable[[Path], None] = _no_picture
        for part in settings.parts:
            if part == SIMULATED:
                found, draw = _simulated(settings)
            else:
                found = _measured(part, settings)
                print(_lines(found))
            rows += found
        write_results(arguments, rows, draw)
        return 0


def _simulated(settings: Settings) -> tuple[list[Row], Callable[[Path], None]]:
    from pcomm.ntp.bench.simulated import predict_places, predict_traces
    from pcomm.ntp.bench.simulated_report import draw, rows_of_predictions, summary_lines

    found = [*predict_places(placements=settings.placements), *predict_traces()]
    print("\n".join(summary_lines(found)))
    return rows_of_predictions(found), partial(draw, found=found)


def _measured(part: str, settings: Settings) -> list[Row]:
    match part:
        case "host":
            from pcomm.ntp.bench.host import host_rows

            return host_rows(settings.rounds)
        case "step":
            return _steps(settings)
        case "reshard":
            from pcomm.ntp.bench.state_moves import layers_of, state_mib_of, time_moves
            from pcomm.ntp.bench.state_moves_report import move_rows

            state_mib = state_mib_of(layers_of(settings.state_mib))
            return move_rows(time_moves(settings.state_mib, settings.rounds), state_mib)
    return _kills(settings)


def _steps(settings: Settings) -> list[Row]:
    from pcomm.ntp.bench.step import SIZES, busiest_share, jobs, time_steps
    from pcomm.ntp.bench.step_report import step_rows

    rows: list[Row] = []
    for place, (tp, batch) in SIZES.items():
        share = busiest_share(*jobs(tp), batch)
        rows += step_rows(time_steps(tp, batch, settings.rounds), share, place)
    return rows


def _kills(settings: Settings) -> list[Row]:
    from pcomm.ntp.bench.kills import SETTINGS, kill_ranks
    from pcomm.ntp.bench.kills_report import kill_rows

    rows: list[Row] = []
    for tp, signs in SETTINGS:
        found = kill_ranks(tp, settings.kills, signs, tell=_tell)
        rows += kill_rows(found, f"2 x TP{tp}, {signs.words}")
    return rows


def _lines(rows: list[Row]) -> str:
    """The rows for a reader."""
    lines = []
    for row in rows:
        ratio = "" if row.ratio is None else f"  {row.ratio:.3f} x {row.ratio_to}"
        lines.append(f"{row.case:<72} {row.value:>9.3f} {row.unit}{ratio}")
    return "\n".join(lines)


def _no_picture(path: Path) -> None:
    raise AssertionError(path)


def _settings(arguments: argparse.Namespace) -> Settings:
    base = _QUICK if arguments.quick else _DEFAULT
    changes: dict[str, Any] = {}
    if arguments.parts is not None:
        changes["parts"] = tuple(arguments.parts.split(","))
    for name in ("rounds", "kills"):
        if getattr(arguments, name) is not None:
            changes[name] = getattr(arguments, name)
    return replace(base, **changes)


def _tell(kill: Kill) -> None:
    print(f"a rank was killed: {kill.recovery.seconds:.2f} s to the next committed step")


command = NtpBenchmark()
