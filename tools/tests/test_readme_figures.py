"""Compares tables of figures in pages with the committed rows that they are taken from."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from importlib import import_module

import pytest
from PIL import Image

from core_bench.pictures import LETTERS, draw
from core_bench.rows import load_rows
from repository import PACKAGES, ROOT
from row_tables import (
    PAGES,
    case_of,
    cells,
    claims,
    fill_table,
    filled,
    rows_of,
    tables_in,
    whole_rows_of,
)
from works_with import outcomes

BENCHMARKS = {
    path.parent.name
    for package in PACKAGES
    for path in package.glob("benchmarks/*_bench/command.py")
}
TABLES = [
    (str(page.relative_to(ROOT)), name, table)
    for page in PAGES
    for name, _, table in tables_in(page.read_text())
]


@pytest.mark.parametrize(("page", "name", "table"), TABLES, ids=lambda part: part[:40].strip())
def test_figures_are_those_of_the_rows(page, name, table):
    """Read apart from what writes them: every number is a row, every dash is none."""
    rows = rows_of(name)
    (unit, *places), _, *lines = (cells(line) for line in table.strip().splitlines())
    units = {unit for _, unit in rows}
    for case, *figures in lines:
        for place, figure in zip(places, figures, strict=True):
            value = rows.get((case_of(case, place), unit))
            where = f"{page}: {case} @ {place}, {unit}"
            assert (figure == "-") == (value is None), f"{where}: {figure}, the row has {value}"
            if value is not None:
                digits = len(figure.partition(".")[2])
                half = 0.5 * 10**-digits + 1e-9
                assert abs(float(figure) - float(value)) <= half, f"{where}: {figure} for {value}"
    assert unit in units or all(figure == "-" for line in lines for figure in line[1:])


@pytest.mark.parametrize("page", [p for p in PAGES if tables_in(p.read_text())], ids=str)
def test_pages_are_as_the_tool_writes_them(page):
    text = page.read_text()  # type: ignore[attr-defined]
    assert filled(text) == text, "run `python tools/reference_pages.py`"


def _times(name, unit, ours, theirs, places):
    """By how much one case is above another at each place."""
    rows = rows_of(name)
    return [
        float(rows[f"{ours} @ {place}", unit]) / float(rows[f"{theirs} @ {place}", unit])
        for place in places
    ]


def _ratios(model, sizes):
    """Those of the medians of pairs: batch-invariant weights over F.linear."""
    rows = whole_rows_of("inference_batch_invariant")
    cases = [f"linears, batch-invariant weights @ {model}, threads 1, rows {n}" for n in sizes]
    return [float(rows[case, "ms"]["ratio"]) for case in cases]


def _values(name, unit, *cases):
    rows = rows_of(name)
    return [float(rows[case, unit]) for case in cases]


def _predicted(benchmark, unit):
    """Of each prediction of a unit, its part of what was measured in the same run."""
    rows = load_rows(ROOT / "docs" / "benchmarks" / "forecast.csv")
    rows = [row for row in rows if row.benchmark == benchmark and row.unit.startswith(unit)]
    measured = {row.case: row.value for row in rows if row.ratio is None}
    return [row.value / measured[row.ratio_to] for row in rows if row.ratio is not None]


def _how_close(benchmark):
    """How many were predicted, how many of them within 15 %, and the least and the largest part."""
    parts = _predicted(benchmark, "ms")
    return [len(parts), sum(abs(part - 1) <= 0.15 for part in parts), min(parts), max(parts)]


def _ends(feature):
    """Of models of transformers: how many are equal, how many end in each other way."""
    (found,) = (one["outcomes"] for one in outcomes()["features"] if one["name"] == feature)
    return Counter(outcome.partition(":")[0] for outcome in found.values())


_SHARED = [f"cp {n} random sequences" for n in ("2, 64", "4, 64", "4, 16")]
_STEPS = [f"{n} ranks, {model}" for n in (2, 4) for model in ("linear", "transformer")]
_GDN, _INFERENCE = ("packages/pcomm-gdn-cp/README.md", "packages/pcomm-inference/README.md")
_FSDP, _NTP = ("packages/pcomm-fsdp/README.md", "packages/pcomm-ntp/README.md")
_PLAN = "docs/how-to/plan-a-run.md"
_KILLED = ("median @ 2 x TP4, told by the launcher", "s to the next committed step")
_FAMILIES, _CLASSES = _ends("pcomm-inference"), _ends("pcomm-fsdp")
_SECONDS = ("installation", "s of the processor")
_FIRST = {("fetched", "MB"): 1, _SECONDS: 1, ("on the disk", "MB"): 1000}


def _changes(*names):
    cases = [f"{name} @ {step}" for name in names for step in _STEPS]
    return _values("fsdp", "x as fast, by one change", *cases)


# Page, sentence, and what its numbers are: one for each, or the ends of more.
IN_SENTENCES = [
    (_GDN, r"Of the (\S+) to (\S+)x by", _times("gdn_cp", "ms", "fused", "heads", _SHARED)),
    (
        _GDN,
        r"bytes explain (\S+)x",
        _times("gdn_cp", "MB by arithmetic", "fused", "heads", _SHARED),
    ),
    (_INFERENCE, r"SmolLM2-135M take (\S+) times", _ratios("SmolLM2-135M", [1])),
    (_INFERENCE, r"of a tiny model (\S+) times", _ratios("tiny", [1])),
    (
        _INFERENCE,
        r"for 4 to 256 rows (\S+) to (\S+) times",
        [n for model in ("tiny", "SmolLM2-135M") for n in _ratios(model, (4, 8, 16, 64, 256))],
    ),
    (
        _INFERENCE,
        r"(\d+) of (\d+) causal families, .*? (\d+) are refused with the reason, (\d+) were not",
        [_FAMILIES["equal"], _FAMILIES.total(), _FAMILIES["refused"], _FAMILIES["not tried"]],
    ),
    (
        _FSDP,
        r"(\d+) of (\d+) classes of transformers that were tried",
        [_CLASSES["equal"], _CLASSES.total() - _CLASSES["not tried"]],
    ),
    (_FSDP, r"steps are (\S+) to (\S+) times as fast on", _changes("separate communicators")),
    (_FSDP, r"and (\S+) to (\S+) on a rail of its own", _changes("a rail for reduces")),
    (
        "docs/decisions/0010-gloo-collectives-between-pairs.md",
        r"steps are (\S+) to (\S+) times as fast by pairs",
        _changes("pairs in reduces", "pairs in gathers"),
    ),
    (_NTP, r"of (\d+) kills", [float(whole_rows_of("ntp")[_KILLED]["rounds"])]),
    (
        "docs/benchmarks/torchft.note",
        r"in place of 0.3 s: (\S+) s here and (\S+) s there",
        [
            *_values("torchft", "s, median", "torchft, shortest @ 4 replica groups"),
            *_values("ntp", _KILLED[1], "median @ 2 x TP2, by heartbeats alone, dead after 0.5 s"),
        ],
    ),
    (
        _PLAN,
        r"Of (\d+) sharded steps, (\d+) .*?\((\S+) to (\S+)\)",
        _how_close("plan_beside_fsdp"),
    ),
    (
        _PLAN,
        r"Of (\d+) exchanges .*?, (\d+) .*?\((\S+) to (\S+)\)",
        _how_close("plan_beside_gdn_cp"),
    ),
    (_PLAN, r"too short: (\S+), (\S+) and (\S+) of", _predicted("dry_run_beside_run", "ms")),
    (
        _PLAN,
        r"is counted to (\S+) % of",
        [max(100 * abs(part - 1) for part in _predicted("dry_run_beside_run", "MiB"))],
    ),
    (
        "docs/gpu-counts.md",
        r"is within (\S+) % of torch's allocator",
        [max(100 * abs(part - 1) for part in _predicted("dry_run_beside_run", "MiB"))],
    ),
    (
        "README.md",
        r"fetches (\d+) MB and installs them in (\d+) seconds of processor time, as (\S+) GB",
        [float(rows_of("first_command")[key]) / per for key, per in _FIRST.items()],
    ),
]


@pytest.mark.parametrize(
    ("page", "sentence", "measured"), IN_SENTENCES, ids=lambda part: str(part)[:30]
)
def test_figures_in_sentences_are_those_of_the_rows(page, sentence, measured):
    said = re.search(sentence, " ".join((ROOT / page).read_text().split())).groups()
    wanted = measured if len(said) == len(measured) else [min(measured), max(measured)]
    for shown, value in zip(said * (len(wanted) // len(said)), wanted, strict=True):
        half = 0.5 * 10 ** -len(shown.partition(".")[2]) + 1e-9
        assert abs(float(shown) - value) <= half, f"{shown} for {value}"


def test_pages_with_rows_are_found():
    assert {name for _, name, _ in TABLES} >= {"core", "fsdp"}
    # A mark that is spelt otherwise would leave its table unread.
    marks = sum(page.read_text().count("<!-- rows of") for page in PAGES)
    assert marks == len(TABLES)


def test_a_table_is_filled_from_the_rows():
    rows = {("ours @ 2 ranks", "ms"): "391.27", ("ours @ 4 ranks", "ms"): "1614.5"}
    table = "| ms | 2 ranks | 4 ranks | 8 ranks |\n|---|---|---|---|\n| `ours` | 1 | 2 | 3 |\n"
    assert fill_table(table, rows, 0).splitlines()[2] == "| `ours` | 391 | 1614 | - |"
    assert fill_table(table, rows, 1).splitlines()[2] == "| `ours` | 391.3 | 1614.5 | - |"
    alone = "| us | value |\n|---|---|\n| `a call` | 1 |\n"
    assert fill_table(alone, {("a call", "us"): "0.25"}, 2).splitlines()[2] == "| `a call` | 0.25 |"
    page = (
        "text\n\n<!-- rows of fsdp, 0 decimals -->\n| ms | nowhere |\n|---|---|\n| a | 7 |\n\nmore"
    )
    assert filled(page) == page.replace("7", "-")


def test_claims_are_those_of_the_rows():
    """Read apart from what writes them; both sides were measured on one kind of machine."""
    page = (ROOT / "docs" / "benchmarks" / "index.md").read_text()
    _, table = page.split("<!-- claims -->\n\n")
    lines = [cells(line) for line in table.split("\n\n")[0].splitlines()[2:]]
    assert lines
    for claim, (says, ours, theirs, machine, again) in zip(claims(), lines, strict=True):
        assert says == claim["says"]
        for shown, (name, *key) in ((ours, claim["ours"]), (theirs, claim["theirs"])):
            row = whole_rows_of(name)[tuple(key)]
            assert machine == f"{row['hardware']}, {row['cores']} cores", says
            number, *unit = shown.strip("*").partition(":")[0].split()
            assert unit == claim["unit"].split(), says
            measured = float(row["value"]) * claim.get("times", 1)
            half = 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9
            assert abs(float(number) - measured) <= half, f"{says}: {number} for {measured}"
        words = again.strip("`").split()
        folder = words[-1].replace("-", "_") + "_bench"
        is_command = words[:2] == ["pcomm", "bench"] and folder in BENCHMARKS
        is_script = words[0] == "python" and (ROOT / words[1]).is_file()
        assert is_command or is_script or (ROOT / words[0]).is_file(), says


def test_missed_goals_are_counted_at_the_top_of_the_benchmarks():
    folder = ROOT / "docs" / "benchmarks"
    goals = [line for line in (folder / "serving.note").read_text().splitlines() if "| at " in line]
    missed = sum(line.endswith("| no |") for line in goals)
    names = ("six", "seven", "eight", "nine", "ten", "eleven")
    words = dict(zip(range(6, 12), names, strict=True))
    top = (folder / "index.md").read_text().partition("<!-- claims -->")[0]
    assert f"{words[missed]} of the {len(goals)} goals of serving" in top.lower()


@pytest.mark.parametrize("module", sorted(BENCHMARKS))
def test_committed_pictures_answer_by_the_committed_rows(module, tmp_path):
    """The page has them, with the answer that the rows give today as their text."""
    pytest.importorskip("matplotlib", reason="it draws the pictures, and is no requirement")
    folder = ROOT / "docs" / "benchmarks"
    page = (folder / "index.md").read_text()
    rows = load_rows(folder / f"{module.removesuffix('_bench')}.csv")
    for picture in import_module(f"{module}.pictures").PICTURES:
        now = _title(draw(picture, rows, tmp_path))
        assert now == _title(folder / f"{picture.name}.png"), "run pcomm bench --from --plot"
        assert now != picture.question, "no answer"
        assert f"![{now}]({picture.name}.png)" in page
        assert _faults(picture, rows) == []


def _title(path):
    with Image.open(path) as image:
        return " ".join(image.text["Title"].split())


def _faults(picture, rows):
    """Words that are cut, that lie on others, or that a phone of 360 pixels shows too small."""
    from matplotlib import rc_context
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    with rc_context({"font.size": LETTERS}):
        figure = picture.figure(rows)
        figure.canvas.draw()
    size = figure.bbox
    # matplotlib makes labels beyond the ends of an axis, too, and does not draw them.
    beyond = {
        tick.label1
        for axis in figure.findobj(Axis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    shown = [one for one in figure.findobj(Text) if one.get_visible() and one not in beyond]
    words = [one for one in shown if one.get_text().strip()]
    boxes = [(one.get_text(), one.get_window_extent()) for one in words]
    found = [f"{text}: cut" for text, box in boxes if box.x0 < 0 or box.x1 > size.width]
    found += [f"{text}: cut" for text, box in boxes if box.y0 < 0 or box.y1 > size.height]
    pairs = itertools.combinations(boxes, 2)
    found += [f"{a} and {b}" for (a, first), (b, second) in pairs if first.overlaps(second)]
    pixels = 360 / figure.get_figwidth() / 72
    return found + [one.get_text() for one in words if one.get_fontsize() * pixels < 10]
