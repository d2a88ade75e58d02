"""Rounds of timings, and the rows that are kept of them."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core_bench.runner import Row, Timing, compare, save_rows, take_turns, time_cases
from pcomm.core.errors import ConfigError


class Clock:
    """A time that passes only when a case says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


def test_cases_take_turns_and_are_timed_by_the_call() -> None:
    clock, order = Clock(), []

    def case(name: str, seconds: float) -> None:
        order.append(name)
        clock.take(seconds)

    found = time_cases(
        {"slow": lambda: case("slow", 1.5), "fast": lambda: case("fast", 0.5)},
        rounds=7,
        round_s=1.0,
        clock=clock,
    )
    assert found["slow"].rounds_us == pytest.approx([1.5e6] * 7)
    assert found["fast"].rounds_us == pytest.approx([0.5e6] * 7)
    assert order[-6:] == ["slow", "fast", "fast"] * 2


def test_comparison_is_within_a_round_so_that_a_slow_hour_does_not_count() -> None:
    bare, ours = Timing("bare", (1.0, 10.0, 2.0)), Timing("ours", (3.0, 12.0, 3.0))
    assert ours.more_than(bare) == 2.0
    assert ours.ratio_to(bare) == 1.5
    rows = compare("b", ours, bare)
    assert [(row.case, row.value, row.ratio_to, row.ratio) for row in rows] == [
        ("bare", 2.0, "", None),
        ("ours", 3.0, "bare", 1.5),
        ("ours: more in the same round", 2.0, "", None),
        ("ours: more in the fastest round", 2.0, "", None),
    ]


def test_rows_replace_those_of_the_same_benchmark_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "core.csv"
    row = Row("b", "case", 1.0, "us", "", None, 7)
    save_rows(path, [row, replace(row, case="other")])
    save_rows(path, [replace(row, benchmark="a", command="python x, y")])
    save_rows(path, [replace(row, value=2.0)])
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(r["benchmark"], r["case"], r["value"]) for r in found] == [
        ("a", "case", "1.0"),
        ("b", "case", "2.0"),
    ]
    assert found[0]["command"] == "python x, y"
    assert all(r["hardware"] and r["python"] and r["torch"] and r["date"] for r in found)


@pytest.mark.parametrize(
    ("program", "shown"),
    [("benchmarks/x.py", "python benchmarks/x.py"), ("../env/bin/pcomm", "pcomm")],
)
def test_the_command_of_a_row_names_no_folder_of_the_machine(
    program: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(folder / program), "bench", "--csv", "a b"])
    assert Row("b", "case", 1.0, "us", "", None, 7).command == f"{shown} bench --csv 'a b'"


def test_few_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="rounds=3"):
        time_cases({"a": lambda: None}, rounds=3)


def test_each_case_has_its_turn_in_each_round() -> None:
    order: list[str] = []

    def turn(name: str, *parts: str) -> Callable[[], float | dict[str, float]]:
        def run() -> float | dict[str, float]:
            order.append(name)
            return dict.fromkeys(parts, float(len(order))) if parts else float(len(order))

        return run

    turns = {"a": turn("a"), "b": turn("b", "b 1", "b 2"), "slow": turn("slow")}
    found = take_turns(turns, 3, fewer={"slow": 1})
    assert order == ["a", "b", "a", "b", "slow", "a", "b", "a", "b"]
    assert {name: timing.rounds_us for name, timing in found.items()} == {
        "a": (3.0, 6.0, 8.0),
        "b 1": (4.0, 7.0, 9.0),
        "b 2": (4.0, 7.0, 9.0),
        "slow": (5.0,),
    }
    order.clear()
    take_turns({"a": turns["a"]}, 2, warm_up=False)
    assert order == ["a", "a"]


def test_options_need_neither_torch_nor_matplotlib() -> None:
    program = "import sys, core_bench.runner; print({'torch', 'matplotlib'} & {*sys.modules})"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "set()\n"
