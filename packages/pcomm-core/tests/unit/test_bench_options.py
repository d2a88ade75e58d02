"""What all benchmarks have in common: options of numbers, checks of them, and what is written."""

from __future__ import annotations

import argparse
import csv
from functools import partial
from pathlib import Path

import pytest

from pcomm.core.command.bench import options
from pcomm.core.command.bench.options import (
    add_numbers,
    add_outputs,
    check_can_plot,
    check_counts,
    check_parts,
    check_rounds,
    given_numbers,
)
from pcomm.core.command.bench.results import write_results
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.testing.timing import Row


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser()
    add_numbers(found, "--streams", "texts at once", (1, 8))
    add_numbers(found, "--contexts", "tokens of context", (64,), metavar="T,T")
    add_outputs(found, rows="these parts", picture="the times")
    return found


def test_options_of_numbers_are_those_that_were_given() -> None:
    def given(line: str) -> dict[str, tuple[int, ...]]:
        return given_numbers("any", parser().parse_args(line.split()), ("streams", "contexts"))

    assert given("") == {}
    assert given("--contexts 7") == {"contexts": (7,)}
    assert given("--contexts 7,-1 --streams 2,1") == {"streams": (2, 1), "contexts": (7, -1)}
    with pytest.raises(ConfigError, match="words that are no numbers") as caught:
        given("--streams 1;2")
    assert str(caught.value).startswith("pcomm bench any --streams 1;2: ")


def test_the_help_names_forms_and_defaults() -> None:
    shown = " ".join(parser().format_help().split())
    assert "--streams N,N texts at once (1,8)" in shown
    assert "--contexts T,T tokens of context (64)" in shown
    assert "--csv FILE replace the rows of these parts there" in shown
    assert "--plot FILE draw the times as a PNG" in shown


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


def test_rows_and_picture_are_written_where_they_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("any", "a case", 1.5, "ms", "", None, 7)]
    table, image = tmp_path / "rows.csv", tmp_path / "new.png"
    # The function gets the path as its last argument.
    write = partial(
        write_results, rows=rows, draw=partial(lambda text, to: to.write_text(text), "drawn")
    )
    write(parser().parse_args([]))
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    write(parser().parse_args(["--csv", str(table), "--plot", str(image)]))
    assert capsys.readouterr().out == f"rows: {table}\npicture: {image}\n"
    with table.open(newline="") as file:
        assert [(row["case"], row["value"]) for row in csv.DictReader(file)] == [("a case", "1.5")]
    assert image.read_text() == "drawn"
