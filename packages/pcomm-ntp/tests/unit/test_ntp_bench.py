"""The benchmark: its arithmetic on made-up times, and its options."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

import pytest

from core_bench.runner import Row
from ntp_bench.command import PARTS, Settings, command
from ntp_bench.host import large_job
from ntp_bench.kills import (
    GenerationChange,
    Kill,
    RecoveryCost,
    RecoveryParts,
    TimedAttempt,
    is_whole,
    kill_rows,
    parts_of,
    read_attempts,
    recovery_of,
    steps_missing,
)
from ntp_bench.small_model import rows_of_replica, stack_units
from ntp_bench.state_moves import MoveTimes, bytes_between, layers_of, move_rows, state_mib_of
from ntp_bench.steps import BY_HAND, OVER_SHARE, SIZES, StepTimes, busiest_share, jobs, step_rows
from pcomm.core.errors import ConfigError
from pcomm.ntp.redistribute import Moved


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def by_case(rows: list[Row]) -> dict[tuple[str, str], Row]:
    found = {(row.case, row.unit): row for row in rows}
    assert len(found) == len(rows)
    return found


# -- kills ---------------------------------------------------------------------------------------


def steps(*found: tuple[float, int, bool, int]) -> list[TimedAttempt]:
    return [TimedAttempt(*one) for one in found]


def test_recovery_ends_with_the_slowest_of_those_that_are_left() -> None:
    found = {
        # Its last commit is with the killed one, whose gradients were summed before it died.
        0: steps((9.9, 5, True, 4), (10.1, 6, True, 4), (10.3, 6, False, 3), (10.7, 7, True, 3)),
        1: steps((9.9, 5, True, 4), (10.2, 5, False, 3), (10.25, 5, False, 3), (10.9, 6, True, 3)),
        2: steps((9.9, 5, True, 4), (10.05, 5, True, 4)),
    }
    assert recovery_of(found, killed_at_s=10.0, victim=2, members=3) == RecoveryCost(
        pytest.approx(0.9), 3
    )
    assert recovery_of(found, killed_at_s=10.0, victim=0, members=3) is None
    with pytest.raises(ConfigError, match="no other process"):
        recovery_of({2: []}, killed_at_s=10.0, victim=2, members=3)


def test_a_job_is_whole_when_the_last_steps_of_all_were_committed_by_all() -> None:
    own = steps((1.0, 1, False, 3), (2.0, 1, True, 4), (3.0, 2, True, 4))
    assert is_whole([own, own], members=4, commits=2)
    assert not is_whole([own, own], members=4, commits=3)
    assert not is_whole([own, own[-1:]], members=4, commits=2)
    fewer = steps((2.0, 1, True, 4), (3.0, 2, True, 3))
    assert not is_whole([own, fewer], members=4, commits=2)


def test_a_line_that_is_being_written_is_no_attempt(tmp_path: Path) -> None:
    path = tmp_path / "attempts.txt"
    assert read_attempts(path) == []
    whole = TimedAttempt(1.25, 3, True, 7)
    path.write_text(whole.line() + "\n" + "2.5 4 1 ")
    assert read_attempts(path) == [whole]
    # Complete up to its end, so that "7" may be the beginning of "70".
    path.write_text(whole.line() + "\n" + "2.5 4 1 7")
    assert read_attempts(path) == [whole]


def test_parts_of_a_recovery_add_up() -> None:
    attempts = steps((9.0, 4, True, 4), (10.5, 4, False, 3), (10.75, 5, True, 3), (11, 6, True, 3))
    changes = [GenerationChange(5.0, 9, 9, 9, 9), GenerationChange(10.5, 0.1, 0.05, 0.05, 0.2)]
    parts = parts_of(attempts, changes, killed_at_s=10.0, members=3)
    assert parts is not None
    found = (parts.detect_s, parts.agree_s, parts.open_s, parts.build_s, parts.reshard_s)
    assert found == pytest.approx((0.1, 0.1, 0.05, 0.05, 0.2))
    assert sum(found) + parts.step_s == pytest.approx(0.75)
    assert parts_of(attempts, changes[:1], killed_at_s=10.0, members=3) is None


def test_a_step_left_out_or_applied_twice_is_counted() -> None:
    def numbers(*found: tuple[int, bool]) -> int:
        return steps_missing(
            [TimedAttempt(0.0, step, is_committed, 4) for step, is_committed in found]
        )

    assert numbers((1, True), (2, True), (2, False), (3, True)) == 0
    # Ready when the other died, and so applied in the recovery.
    assert numbers((1, True), (2, False), (3, True)) == 0
    assert numbers((1, True), (3, True)) == 1
    assert numbers((1, True), (1, True)) == 1
    assert numbers((1, True), (3, False)) == 1


def test_rows_of_kills() -> None:
    parts = RecoveryParts(0.01, 0.02, 0.03, 0.04, 0.05, 0.06)
    kills = [Kill(RecoveryCost(seconds, 3), parts, 0) for seconds in (0.5, 0.25, 2.0)]
    rows = by_case(kill_rows(kills, "2 x TP4"))
    unit = "s to the next committed step"
    assert rows["median @ 2 x TP4", unit].value == 0.5
    assert rows["longest @ 2 x TP4", unit].value == 2.0
    parts_unit = "ms of the slowest rank, median"
    assert rows["reshard @ 2 x TP4", parts_unit].value == 50.0
    assert rows["lost or trained on twice @ 2 x TP4", "samples of all kills"].value == 0
    assert {row.rounds for row in rows.values()} == {3}
    (bad,) = [
        row.value
        for row in kill_rows([Kill(RecoveryCost(1.0, 0), None, 2)], "x")
        if row.unit == "samples of all kills"
    ]
    assert bad == 128


# -- steps ---------------------------------------------------------------------------------------


def test_work_of_the_busiest_rank() -> None:
    for tp, rows in SIZES.values():
        whole, smaller = jobs(tp)
        assert whole.token_shares(rows) == (rows // 2, rows // 2)
        # All ranks that are left have the same work but for the rounding of 2,048 columns.
        assert busiest_share(whole, smaller, rows) == pytest.approx(2 * tp / (2 * tp - 1), rel=1e-3)
        assert [rows_of_replica((3, 4), one) for one in (0, 1)] == [slice(0, 3), slice(3, 7)]


def test_steps_are_compared_with_the_faster_baseline() -> None:
    def times(wall: float, core: tuple[float, ...]) -> list[StepTimes]:
        ranks = [StepTimes((wall * 1e6,) * 3, (own * 1e6,) * 3, 2**20, 2) for own in core]
        return [*ranks, StepTimes((), (), 0, 0)]

    found = {
        BY_HAND: times(0.4, (0.1, 0.1, 0.1)),
        "whole": times(0.2, (0.2, 0.1, 0.3)),
        "one rank lost": times(0.3, (0.15, 0.12, 0.1)),
    }
    rows = by_case(step_rows(found, Fraction(4, 3), "here"))
    lost = rows["one rank lost @ here", "ms, wall"]
    assert (lost.value, lost.ratio_to, lost.ratio) == (300.0, "whole @ here", 1.5)
    busiest = rows["one rank lost @ here", "ms of a core, busiest rank"]
    assert (busiest.value, busiest.ratio_to, busiest.ratio) == (150.0, "whole @ here", 0.5)
    # 150 ms beside 100 ms by hand, for 4/3 of the work.
    assert rows["one rank lost @ here", OVER_SHARE].value == 1.125
    assert rows["whole @ here", "ms, wall"].ratio is None
    assert rows["whole @ here", "ms of cores, all ranks"].value == 600.0
    assert rows["one rank lost @ here", "MiB sent in sums"].value == 1.0


# -- moves ---------------------------------------------------------------------------------------


def test_bytes_between_ranks_are_those_that_lack() -> None:
    """A rank gets the columns that it has under the new plan and had not under the old one."""
    whole, smaller = jobs(4)
    between = bytes_between(whole, smaller, 1, tuple(range(7)))
    # Two matrices of 512 numbers a column, each with two moments, in fp32.
    of_column = 2 * 512 * 3 * 4
    for rank in range(7):
        places = [(made, made.place(rank)) for made in (whole, smaller)]
        old, new = (
            set(made.layout("*.up.weight", at.replica).positions(at.index)) for made, at in places
        )
        got = sum(number for (_, target), number in between.items() if target == rank)
        assert got == len(new - old) * of_column
    assert all(source != target for source, target in between)
    assert stack_units(512)["*.up.weight"].count == 2048


def test_rows_of_moves() -> None:
    def times(received: int, ours: float) -> MoveTimes:
        return MoveTimes(
            Moved(0, received, 2 << 20, 1), (ours * 1e6,) * 3, (0.5e6,) * 3, received == 0
        )

    found = {"a rank is lost": [times(0, 0.5), times(5 << 20, 1.0), MoveTimes(None, (), (), True)]}
    rows = by_case(move_rows(found, 24))
    place = "a rank is lost, 24 MiB a replica"
    ours = rows[f"reshard @ {place}", "ms"]
    assert (ours.value, ours.ratio) == (1000.0, 2.0)
    assert ours.ratio_to == f"one all-to-all of the bytes @ {place}"
    assert rows[f"reshard @ {place}", "bytes over the fewest"].value == 1.25
    assert rows[f"reshard @ {place}", "ranks with a wrong value"].value == 1
    assert [layers_of(size) for size in (1, 35, 37, 100)] == [1, 1, 2, 4]
    assert state_mib_of(4) == 96


# -- options -------------------------------------------------------------------------------------


def test_a_large_job_has_the_share_of_failures_it_says() -> None:
    topology, failures, _ = large_job()
    assert len(topology.ranks) == 100_800
    assert len(failures.ranks(topology)) == 403


def test_what_cannot_be_meant_is_refused() -> None:
    for words, told in {
        ("--parts", "steps"): "--parts steps",
        ("--kills", "0"): "--kills 0",
        ("--rounds", "3"): "--rounds 3",
    }.items():
        with pytest.raises(ConfigError, match=told):
            run(*words)
    assert Settings().parts == PARTS
