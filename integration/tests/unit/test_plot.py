"""Pictures of runs, read from the artists that matplotlib draws, and the table beside them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pcomm.core.errors import ConfigError
from pcomm.integration.commands.plot import command
from pcomm.integration.config.toml import apply_overrides, to_toml
from pcomm.integration.metrics.picture import RunRows, draw_loss, figure_of
from pcomm.integration.recipes import tiny

STEPS = 40


def write_run(folder: Path, *overrides: str, factor: float = 1.0, has_bytes: bool = True) -> Path:
    """A run's folder without weights: losses that jump around 8, evaluations at steps 20 and 40."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(apply_overrides(tiny(), overrides)))
    rows: list[dict[str, float | None]] = []
    for step in range(1, STEPS + 1):
        bits = factor * (8 + step % 2)
        row = {"step": step, "loss": bits * 2, "train_bits_per_byte": bits, "step_ms": 500.0}
        row |= {"mean_tokens_per_s": 1234.5, "peak_memory_mib": 100.0 + step, "lr": 0.25 / step}
        rows.append(row if has_bytes else {k: row[k] for k in row if k != "train_bits_per_byte"})
        if step % 20 == 0:
            rows.append({"step": step, "bits_per_byte": factor * 120 / step, "eval_s": 10.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def plotted(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(list(map(str, words))))


def legend(axes) -> list[str]:
    return [] if axes.get_legend() is None else [t.get_text() for t in axes.get_legend().texts]


def test_one_run_has_a_smooth_line_over_a_pale_one_in_one_unit(tmp_path):
    run = write_run(tmp_path / "mine")
    figure = figure_of([RunRows(run)], weight=0.9)
    (axes,) = figure.axes
    pale, smooth, held_out = axes.get_lines()
    assert axes.get_ylabel() == "bits per byte"
    assert axes.get_xlabel() == "step"
    assert axes.get_title() == "mine"
    assert legend(axes) == ["training", "held out"]
    assert list(pale.get_ydata()) == [8.0 + step % 2 for step in range(1, STEPS + 1)]
    assert pale.get_alpha() < 0.5
    assert pale.get_color() == smooth.get_color() != held_out.get_color()
    assert smooth.get_linewidth() > pale.get_linewidth()
    assert smooth.get_ydata()[-1] == pytest.approx(8.5, abs=0.06)
    assert list(held_out.get_xdata()) == [20, 40]
    assert list(held_out.get_ydata()) == [6.0, 3.0]
    # Half of its width is that of a phone, about 2.7 inches: letters are then of 6 points or more.
    letters = [axes.xaxis.label, axes.yaxis.label, axes.title, *axes.get_legend().texts]
    letters += axes.get_xticklabels()
    assert min(text.get_size() for text in letters) * 2.7 / figure.get_size_inches()[0] > 4.5


@pytest.mark.parametrize(
    ("axis", "last", "held_out"),
    [("steps", 40, [20, 40]), ("tokens", 40 * 256, [20 * 256, 40 * 256]), ("time", 30, [20, 40])],
)
def test_what_goes_to_the_right(tmp_path, axis, last, held_out):
    run = RunRows(write_run(tmp_path / "mine"))
    pale, _, evaluated = figure_of([run], axis=axis).axes[0].get_lines()
    assert pale.get_xdata()[-1] == last
    # Of time: 20 steps of half a second and the evaluation, then as much again.
    assert list(evaluated.get_xdata()) == held_out


def test_several_runs_have_a_colour_each_and_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name / "run", factor=f) for name, f in (("a", 1), ("b", 2))]
    runs = [RunRows(folder) for folder in folders]
    (axes,) = figure_of(runs).axes
    labels = [f"{run.folder}, {what}" for run in runs for what in ("training", "held out")]
    assert legend(axes) == labels
    colours = [line.get_color() for line in axes.get_lines()]
    assert colours[:3] == colours[:1] * 3
    assert colours[3:] == colours[3:4] * 3
    assert colours[0] != colours[3]
    # A number of one curve needs no kinds in the legend; a tag is as good as a name.
    (axes,) = figure_of(runs, metric="train/lr").axes
    assert legend(axes) == [str(run.folder) for run in runs]
    assert axes.get_lines()[0].get_ydata()[0] == 0.25


def test_rows_without_bytes_are_drawn_in_nats_and_gaps_are_left_out(tmp_path):
    run = write_run(tmp_path / "old", has_bytes=False)
    new = RunRows(write_run(tmp_path / "new"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": null}\n')
    (axes,) = figure_of([RunRows(run)]).axes
    assert axes.get_ylabel() == "nats per token"
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [40, 40]
    assert figure_of([RunRows(run), new]).axes[0].get_ylabel() == "nats per token"
    (run / "metrics.jsonl").write_text("")
    assert figure_of([RunRows(run)]).axes[0].get_lines()[:] == []
    draw_loss(run)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_and_compares(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", "train.learning_rate=0.5", factor=0.5)
    assert plotted(one, two / "metrics.jsonl", "--out", tmp_path / "both.svg") == 0
    assert "<svg" in (tmp_path / "both.svg").read_text()
    said = capsys.readouterr().out
    table, keys, last = said.strip().split("\n\n")
    lines = [line.split() for line in table.splitlines()]
    assert len({len(line) for line in table.splitlines()}) == 1
    assert lines[1][:2] == [str(one), "40"]
    assert [line[3:] for line in lines[1:]] == [
        ["3.000", "3.000", "40", "1,234", "140"],
        ["1.500", "1.500", "40", "1,234", "140"],
    ]
    # The training loss is the smooth one of the picture.
    assert 8.0 < float(lines[1][2]) < 9.0
    assert [line.split() for line in keys.splitlines()] == [
        ["key", str(one), str(two)],
        ["train.learning_rate", "0.001", "0.5"],
    ]
    assert last.split()[0] == str(tmp_path / "both.svg")
    assert plotted(one, "--metric", "speed/mean_tokens_per_s", "--out", tmp_path / "x.png") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["run", "steps", "last", "lowest", "highest"]
    assert said[1].split() == [str(one), "40", "1,234", "1,234", "1,234"]
    assert plotted(one, one, "--out", tmp_path / "x.png") == 0
    assert "All keys of the configurations are the same." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "grad_nrom"], "--metric grad_nrom: no row with such a number"),
        (["--metric", "tr"], "one number of the rows"),
        (["--smooth", "1"], "--smooth 1: a number outside of 0 to below 1"),
        (["--smooth", "-0.1"], "--smooth -0.1: a number outside"),
        (["--out", "picture.xyz"], "the suffix '.xyz'"),
        (["--out", "absent/picture.png"], "--out absent/picture.png: No such file"),
        (["--x", "tokens"], "--x tokens: no train.global_batch_tokens"),
        (["absent"], "metrics file absent/metrics.jsonl: No such file"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run")
    if "tokens" in words:
        (run / "config.toml").unlink()
    with pytest.raises(ConfigError) as raised:
        plotted("run", *words)
    assert message in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
