"""The runner of all benchmarks: options, checks of them, and what is printed and written."""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from core_bench import runner as options
from core_bench.runner import (
    Benchmark,
    Results,
    check_can_plot,
    check_counts,
    check_parts,
    check_rounds,
    draw_lines,
    grid,
    lines_of,
    option,
    picture,
    row,
    tables,
)
from pcomm.core.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(("values", "words"), [((), ""), ((0,), "0"), ((4, -1), "4,-1")])
def test_counts_below_one_and_none_are_refused(values: tuple[int, ...], words: str) -> None:
    check_counts("any", {"--streams": (1,), "--contexts": (1, 9)})
    with pytest.raises(ConfigError, match="a number below 1, or none") as caught:
        check_counts("any", {"--streams": (1,), "--contexts": values})
    assert caught.value.asked == f"pcomm bench any --contexts {words}"


@pytest.mark.parametrize(
    ("parts", "found", "fix"),
    [
        (("step", "hots"), "no part 'hots'", "Did you mean 'host'?"),
        (("step", "step"), "a part twice, or none", "Name each part once."),
        ((), "a part twice, or none", "Name each part once."),
    ],
)
def test_parts_are_known_and_named_once(parts: tuple[str, ...], found: str, fix: str) -> None:
    check_parts("any", ("step", "host"), {"host": 1, "step": 2, "kills": 3})
    with pytest.raises(ConfigError) as caught:
        check_parts("any", parts, ("host", "step", "kills"))
    assert caught.value.asked == f"pcomm bench any --parts {','.join(parts)}"
    assert (caught.value.found, caught.value.fix) == (found, fix)


def test_rounds_are_refused_below_the_fewest() -> None:
    check_rounds("any", 7, fewest=7, better=31)
    with pytest.raises(ConfigError, match="fewer than 7 rounds") as caught:
        check_rounds("any", 6, fewest=7, better=31)
    assert caught.value.asked == "pcomm bench any --rounds 6"
    assert caught.value.fix == "Use at least 7, better 31."


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    check_can_plot("any")
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        check_can_plot("any")


# -- a benchmark whose options are fields ------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    ranks: tuple[int, ...] = option((2, 4), "numbers of ranks")
    parts: tuple[str, ...] = option(("step", "host"), "what is measured", metavar="NAME,NAME")
    rounds: int = option(5, "turns of each case", metavar="R")
    no_plans: bool = option(False, "do not time plans")
    model: Path | None = option(None, "a model", metavar="DIR", parse=Path)
    warm_up: int = 3

    def __post_init__(self) -> None:
        check_counts("any", {"--ranks": self.ranks})


def benchmark(found: list[Sizes]) -> Benchmark:
    def measure(sizes: Sizes) -> Results | None:
        found.append(sizes)
        rows = [row("any", "a case", 1.23456, "ms", 7, beside=("b case", 0.56789))]
        return Results(rows, "a table", lambda path: path.write_text("drawn") and None)

    quick = Sizes(ranks=(2,), warm_up=1)
    return Benchmark("any", "measures", Sizes(), measure, quick=quick, picture="the times")


def settings(line: str) -> Sizes:
    parser = argparse.ArgumentParser()
    benchmark([]).add_arguments(parser)
    return benchmark([]).settings_of(parser.parse_args(line.split()))


def test_options_are_the_fields_of_settings() -> None:
    assert settings("") == Sizes()
    assert settings("--quick --rounds 9") == Sizes(ranks=(2,), warm_up=1, rounds=9)
    given = settings("--ranks 8 --parts step --no-plans --model a/b")
    assert given == Sizes((8,), ("step",), no_plans=True, model=Path("a/b"))
    for line, words in (("--ranks 0", "a number below 1"), ("--ranks a", "words that are no")):
        with pytest.raises(ConfigError, match=words):
            settings(line)
    parser = argparse.ArgumentParser()
    benchmark([]).add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for words in ("--ranks N,N numbers of ranks (2,4)", "--rounds R turns of each case (5)"):
        assert words in shown
    assert "--no-plans do not time plans" in shown
    assert "warm" not in shown


def test_a_benchmark_measures_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    found: list[Sizes] = []
    one, parser = benchmark(found), argparse.ArgumentParser()
    one.add_arguments(parser)
    table, image = tmp_path / "rows.csv", tmp_path / "new.png"
    words = ["--quick", "--csv", str(table), "--plot", str(image)]
    assert one.run(parser.parse_args(words)) == 0
    assert found == [Sizes(ranks=(2,), warm_up=1)]
    assert capsys.readouterr().out == f"a table\nrows: {table}\npicture: {image}\n"
    with table.open(newline="") as file:
        (saved,) = csv.DictReader(file)
    assert [saved[k] for k in ("value", "ratio_to", "ratio")] == ["1.235", "b case", "0.568"]
    assert image.read_text() == "drawn"


def test_rows_become_tables() -> None:
    rows = [
        row("any", "ours @ 2 ranks", 1.0, "ms"),
        row("any", "ours @ 4 ranks", 123456.0, "ms"),
        row("any", "theirs @ 4 ranks", 2.5, "ms", beside=("ours @ 4 ranks", 2.0)),
    ]
    assert list(grid(rows)) == [
        "          2 ranks    4 ranks",
        "  ours          1  1.235e+05",
        "  theirs        -        2.5",
    ]
    assert list(grid(rows[:2], turned=True)) == [
        "                ours",
        "  2 ranks          1",
        "  4 ranks  1.235e+05",
    ]
    assert list(tables([rows[0], row("any", "alone", 3.0, "us")])) == [
        *("", "ms:", *grid(rows[:1])),
        *("", "us:", *lines_of([row("any", "alone", 3.0, "us")])),
    ]
    assert list(lines_of(rows[2:], width=18)) == [
        "theirs @ 4 ranks       2.500 ms  2.000 x ours @ 4 ranks"
    ]


def test_pictures_are_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with picture(tmp_path / "new" / "a.png", columns=2) as panels:
        draw_lines(panels[0][1], {"ours": [(1, 2.0), (8, 3.0)]}, x="streams", y="tokens/s")
    assert (tmp_path / "new" / "a.png").stat().st_size > 1000
