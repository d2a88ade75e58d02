"""The runner of all benchmarks: options, turns, comparisons, and the rows that are kept."""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from core_bench.pictures import Bars
from core_bench.rows import Row, load_rows, row, save_rows
from core_bench.runner import Benchmark, Results, check_counts, compare, option, take_turns
from core_bench.tables import tables
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
        return Results([*rows, row("any", "alone", 1.23456, "ms", 7)], "a table")

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


def _row(case: str, value: float, **fields: object) -> Row:
    return replace(row("toy", case, value, "ms"), **fields)


def test_rows_are_read_compared_and_drawn_again_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="it draws the picture, and is no requirement")

    def measure(sizes: Sizes) -> Results:
        raise AssertionError("measured")

    bars = Bars(
        "toy",
        "Which?",
        lambda ms: f"Ours takes {ms['pcomm'] / ms['bare']:.1f} of it",
        "ms",
        "ms",
        {"ours": "pcomm", "bare": "bare"},
        place="2 ranks",
    )
    missing = replace(bars, name="none", place="", unit="us")
    one = Benchmark("toy", "measures", Sizes(), measure, pictures=[bars, missing])
    parser = argparse.ArgumentParser()
    one.add_arguments(parser)
    now, then = tmp_path / "now.csv", tmp_path / "then.csv"
    cases = {"ours @ 2 ranks": 2.0, "bare @ 2 ranks": 4.0, "new": 1.0}
    save_rows(now, [_row(case, value) for case, value in cases.items()])
    old = {"ours @ 2 ranks": 4.0, "bare @ 2 ranks": 4.1, "gone": 1.0}
    save_rows(then, [_row(case, value, hardware="abacus") for case, value in old.items()])
    words = ["--from", str(now), "--compare", str(then), "--plot", str(tmp_path / "new")]
    assert one.run(parser.parse_args(words)) == 0
    told = capsys.readouterr().out
    shown = " ".join(told.split())
    assert "Another hardware, " in shown
    assert "and not abacus" in shown
    assert "2 rows are in both runs, 1 of them differ by more than 5%" in shown
    assert "ours @ 2 ranks 0.500 x (2 and 4 ms)" in shown
    assert f"picture: {tmp_path / 'new' / 'toy.png'}" in told
    assert "none of none, for want of rows" in told
    drawn = (tmp_path / "new" / "toy.png").read_bytes()
    assert b"Ours takes 0.5 of it" in drawn
    assert b"mean little" not in drawn
    # A quick run has the same answer, and says what it is worth.
    quick = replace(one, measure=lambda _: Results(load_rows(now), ""), quick=Sizes())
    quick.add_arguments(options := argparse.ArgumentParser())
    assert quick.run(options.parse_args(["--quick", "--plot", str(tmp_path / "quick")])) == 0
    drawn = (tmp_path / "quick" / "toy.png").read_bytes()
    assert b"Ours takes 0.5 of it\n(small sizes and few rounds; the figures mean little)" in drawn
    # Rows of others, no rows and no file are refused.
    save_rows(tmp_path / "other.csv", [replace(_row("a", 1.0), benchmark="other")])
    (tmp_path / "cut.csv").write_text("benchmark,case\ntoy,a\n")
    for name in ("other.csv", "cut.csv", "absent.csv"):
        for word in ("--from", "--compare"):
            with pytest.raises(ConfigError, match="rows that the same benchmark has written"):
                one.run(parser.parse_args([word, str(tmp_path / name)]))


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("num_places", [1, 3, 30])
def test_tables_are_as_wide_as_the_terminal_and_lose_nothing(
    columns: int, num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ("a", "a case with a name of some length")
    rows = [
        _row(f"{name} @ place number {place}", 1000.0 * (place + 1) + len(name))
        for name in names
        for place in range(num_places)
    ]
    alone = _row("x" * 50, 7.5, ratio_to="y" * 40, ratio=2.0)
    lines = list(tables([*rows, alone]))
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    for one in rows:
        assert words.count(f"{one.value:.4g}") == 1
    assert {"x" * 50, "y" * 40, "7.500"} <= set(words)
