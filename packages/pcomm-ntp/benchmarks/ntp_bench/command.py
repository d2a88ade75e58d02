"""`pcomm bench ntp`: what lost ranks cost a job, measured on CPU ranks.

`host` times plans of 100,800 ranks; `step` compares a step of a job that has lost a rank with one
of the whole job; `redistribute` moves the state from one plan to another; `recovery` kills ranks,
and `replicas` all ranks of a replica at once; `copies` compares steps with and without owners of
the optimizer's state; `hosts` takes links of hosts down, in network namespaces, as root. Each part
has rows of its own name, so that `--csv` replaces those of the parts that ran.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from core_bench.rows import Row
from core_bench.runner import Benchmark, Results, check_counts, check_parts, check_rounds, option
from core_bench.tables import lines_of
from ntp_bench.pictures import PICTURES

if TYPE_CHECKING:
    from ntp_bench.kills import Kill

# All but the first start processes.
PARTS = ("host", "step", "redistribute", "recovery", "replicas", "copies")
# What has to be asked for comes last.
ALL_PARTS = (*PARTS, "hosts")


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...] = option(PARTS, f"of {', '.join(ALL_PARTS)}", metavar="P,P")
    # Of steps, and of moves of a state.
    rounds: int = option(41, "rounds of each case", metavar="R")
    kills: int = option(20, "kills of a rank or replica, and losses of a host", metavar="K")
    # What is moved, in MiB.
    state_mib: int = 100

    def __post_init__(self) -> None:
        check_parts("ntp", self.parts, ALL_PARTS)
        check_counts("ntp", {"--kills": [self.kills]})
        check_rounds("ntp", self.rounds, fewest=7, better=41)


def _measure(settings: Settings) -> Results:
    rows: list[Row] = []
    for part in settings.parts:
        found = _measured(part, settings)
        print("\n".join(lines_of(found)))
        rows += found
    return Results(rows, "")


def _measured(part: str, settings: Settings) -> list[Row]:
    match part:
        case "host":
            from ntp_bench.host import host_rows

            return host_rows(settings.rounds)
        case "step":
            return _steps(settings)
        case "redistribute":
            from ntp_bench.state_moves import layers_of, move_rows, state_mib_of, time_moves

            state_mib = state_mib_of(layers_of(settings.state_mib))
            return move_rows(time_moves(settings.state_mib, settings.rounds), state_mib)
        case "replicas":
            return _replicas(settings)
        case "copies":
            from ntp_bench.copies import copy_rows, time_copies

            return copy_rows(time_copies(settings.rounds))
        case "hosts":
            from ntp_bench.lost_hosts import lose_hosts, lost_host_rows

            return lost_host_rows(lose_hosts(settings.kills, tell=_tell))
    return _kills(settings)


def _steps(settings: Settings) -> list[Row]:
    from ntp_bench.steps import SIZES, busiest_share, jobs, step_rows, time_steps

    rows: list[Row] = []
    for place, (tp, batch) in SIZES.items():
        share = busiest_share(*jobs(tp), batch)
        rows += step_rows(time_steps(tp, batch, settings.rounds), share, place)
    return rows


def _kills(settings: Settings) -> list[Row]:
    from ntp_bench.kills import SETTINGS, kill_ranks, kill_rows

    rows: list[Row] = []
    for tp, signs in SETTINGS:
        found = kill_ranks(tp, settings.kills, signs, tell=_tell)
        rows += kill_rows(found, f"2 x TP{tp}, {signs.words}")
    return rows


def _replicas(settings: Settings) -> list[Row]:
    from ntp_bench.kills import REPLICA_SETTINGS, kill_ranks, kill_rows

    rows: list[Row] = []
    for tp, signs in REPLICA_SETTINGS:
        found = kill_ranks(tp, settings.kills, signs, is_replica=True, tell=_tell)
        rows += kill_rows(found, f"2 x TP{tp}, {signs.words}", "ntp lost replica")
    return rows


def _tell(kill: Kill) -> None:
    print(f"lost: {kill.recovery.seconds:.2f} s to the next committed step", flush=True)


_DEFAULT = Settings()
command = Benchmark(
    "ntp",
    "time steps, moves of state and recoveries with lost ranks",
    _DEFAULT,
    _measure,
    quick=replace(_DEFAULT, rounds=7, kills=1, state_mib=4),
    pictures=PICTURES,
)
