"""The runner of all benchmarks: options, turns, comparisons, and the rows that are kept."""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from core_bench.runner import Benchmark, Results, check_counts, compare, option, row, take_turns
from pcomm.core.errors import ConfigError


@dataclass(frozen=True)
class Sizes:
    ranks: tuple[int, ...] = option((2, 4), "numbers of ranks")
    rounds: int = option(5, "turns of each case", metavar="R")
    no_plans: bool = option(False, "do not time plans")
    warm_up: int = 3

    def __post_init__(self) -> None:
        check_counts("any", {"--ranks": self.ranks})


def test_a_benchmark_takes_options_measures_in_turns_and_replaces_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Sizes] = []

    def measure(sizes: Sizes) -> Results:
        found.append(sizes)
        times = {"bare": iter([9.0, 1.0, 10.0, 2.0]), "ours": iter([9.0, 3.0, 12.0, 3.0])}
        timings = take_turns({name: each.__next__ for name, each in times.items()}, 3)
        # Within a round, so that a slow hour does not count.
        rows = compare("any", timings["ours"], timings["bare"])
        return Results([*rows, row("any", "alone", 1.23456, "ms", 7)], "a table", lambda _: None)

    quick, parser = Sizes(ranks=(2,), warm_up=1), argparse.ArgumentParser()
    one = Benchmark("any", "measures", Sizes(), measure, quick=quick)
    one.add_arguments(parser)
    table = tmp_path / "new" / "rows.csv"
    for words in (["--quick"], ["--ranks", "8", "--rounds", "9", "--no-plans"]):
        assert one.run(parser.parse_args([*words, "--csv", str(table)])) == 0
    assert found == [quick, Sizes((8,), 9, no_plans=True)]
    assert capsys.readouterr().out == f"a table\nrows: {table}\n" * 2
    with table.open(newline="") as file:
        saved = list(csv.DictReader(file))
    assert [(r["case"], r["value"], r["ratio_to"], r["ratio"]) for r in saved] == [
        ("bare", "2.0", "", ""),
        ("ours", "3.0", "bare", "1.5"),
        ("ours: more in the same round", "2.0", "", ""),
        ("ours: more in the fastest round", "2.0", "", ""),
        ("alone", "1.235", "", ""),
    ]
    for line in (["--ranks", "0"], ["--ranks", "a"]):
        with pytest.raises(ConfigError):
            one.settings_of(parser.parse_args(line))
