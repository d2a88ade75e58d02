"""Where the numbers of a run go: file, terminal, TensorBoard, picture."""

from __future__ import annotations

import io
import json
import logging
import math
import sys

import pytest
import torch

from pcomm.core.errors import ConfigError
from pcomm.integration import metrics
from pcomm.integration.metrics import (
    JsonLinesSink,
    ProgressSink,
    SinkGroup,
    duration,
    open_sinks,
    plot_loss,
    read_rows,
)
from pcomm.integration.train.loop import bits_per_byte
from pcomm.integration.train.trainer import memory_mib


class Recorder:
    """A sink that remembers, and fails to close when told to."""

    def __init__(self, fails=False):
        self.rows, self.closed, self.fails = [], False, fails

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("disk full")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _row(step, loss=2.0, **more):
    return {"step": step, "loss": loss, **more}


def test_bits_per_byte():
    # A uniform guess among 256 tokens of one byte costs 8 bits a byte.
    assert bits_per_byte(10 * math.log(256), 10) == pytest.approx(8, rel=1e-15)
    assert math.isnan(bits_per_byte(1.0, 0))


def test_a_group_writes_to_all_and_closes_all_even_when_one_fails():
    first, broken, last = Recorder(), Recorder(fails=True), Recorder()
    group = SinkGroup([first, broken, last])
    group.write(_row(1))
    with pytest.raises(OSError, match="disk full"):
        group.close()
    assert first.rows == last.rows == [_row(1)]
    assert first.closed
    assert last.closed


def test_rows_of_a_new_run_are_on_disk_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 9}\nnot even json')
    sink = JsonLinesSink(path)
    sink.write(_row(1, tokens_per_s=10.5))
    assert path.read_text() == '{"step": 1, "loss": 2.0, "tokens_per_s": 10.5}\n'
    # JSON has no word for these numbers.
    sink.write(_row(2, loss=math.nan, grad_norm=math.inf))
    sink.close()
    assert read_rows(path) == [
        _row(1, tokens_per_s=10.5),
        _row(2, loss=None, grad_norm=None),
    ]


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 3, "loss": 1'])
def test_a_resumed_run_keeps_the_rows_of_its_checkpoint(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    rows = [_row(1), _row(2), {"step": 2, "bits_per_byte": 3.0}, _row(3), _row(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    sink = JsonLinesSink(path, keep_through=2)
    sink.write(_row(3, loss=1.5))
    sink.close()
    assert read_rows(path) == [*rows[:3], _row(3, loss=1.5)]


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        (None, 3),
        ('{"step": 1, "loss": 1}\n{"step": 2, "lo', 2),
        ('{"step": 1, "loss": 1}\n{"step": 2, "bits_per_byte": 1}\n{"step": 3, "loss": 1}\n', 1),
        ('{"step": 1, "loss": 1}\n{"step": 2, "loss": null}\n{"step": 3, "loss": 1}\n{"st', 0),
    ],
)
def test_rows_that_are_gone_are_told(tmp_path, caplog, content, missing):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    JsonLinesSink(path, keep_through=3).close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if missing else 0)
    assert all(f"has no rows of {missing} of the 3 steps" in one for one in said)


@pytest.mark.parametrize("line", ["{", "[]", '{"loss": 1}', '{"step": "1"}', ""])
def test_a_damaged_row_is_named_and_nothing_is_lost(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    content = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    path.write_text(content)
    with pytest.raises(ConfigError, match="line 2"):
        JsonLinesSink(path, keep_through=3)
    assert path.read_text() == content
    with pytest.raises(ConfigError, match=r"absent\.jsonl: No such file"):
        read_rows(tmp_path / "absent.jsonl")


def _progress(stream, times, **options):
    clock = iter(times)
    return ProgressSink(stream, clock=lambda: next(clock), **options)


def test_a_terminal_gets_one_line_that_is_rewritten():
    stream = Terminal()
    sink = _progress(stream, [0, 2, 4], total_steps=100)
    sink.write(_row(1, 7.12345, tokens_per_s=12345.6, memory_mib=512.4))
    sink.write({"step": 1, "bits_per_byte": 4.5678})
    sink.write(_row(2, 6.5, tokens_per_s=99.0, memory_mib=9.0))
    sink.close()
    _, first, second = stream.getvalue().split("\r")
    assert first == "step   1/100  loss 7.123  12,346 tokens/s  ETA 3:18  512 MiB in use"
    assert second.rstrip() == (
        "step   2/100  loss 6.500  held-out 4.568 bits/byte  99 tokens/s  ETA 3:16  9 MiB in use"
    )
    assert second.endswith("\n")
    # A shorter line covers the longer one.
    stream = Terminal()
    sink = _progress(stream, [0, 0, 0], total_steps=9)
    sink.write(_row(1, memory_mib=123456))
    sink.write(_row(2))
    _, first, second = stream.getvalue().split("\r")
    assert len(second) == len(first)


def test_a_log_gets_a_line_now_and_then_and_the_last_step():
    stream = io.StringIO()
    sink = _progress(stream, [0, 1, 5, 10.9, 11, 12, 13], total_steps=6, every_s=10)
    for step in range(1, 7):
        sink.write(_row(step))
    sink.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/6", "4/6", "6/6"]
    # The time left of a resumed run counts its own steps.
    stream = io.StringIO()
    _progress(stream, [0, 10], total_steps=100, first_step=90).write(_row(95))
    assert "ETA 0:10" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01"), (-3, "0:00")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class Writer:
    def __init__(self):
        self.calls = []

    def add_scalar(self, *call):
        self.calls.append(call)

    def close(self):
        self.calls.append("closed")


def test_tensorboard_gets_each_number_at_its_step():
    writer = Writer()
    sink = metrics.TensorBoardSink(writer)
    sink.write(_row(3, lr=0.1))
    sink.close()
    assert writer.calls == [("loss", 2.0, 3), ("lr", 0.1, 3), "closed"]


def test_without_tensorboard_there_is_no_sink(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    assert metrics.open_tensorboard(tmp_path / "tensorboard") is None
    assert not (tmp_path / "tensorboard").exists()


def test_a_broken_tensorboard_is_told_and_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING, logger="pcomm"):
        assert metrics.open_tensorboard(tmp_path) is None
    assert "cannot be imported" in caplog.text


def test_tensorboard_writes_event_files_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    sink = metrics.open_tensorboard(tmp_path / "tensorboard", keep_through=2)
    sink.write(_row(3))
    sink.close()
    assert [path.name.startswith("events.") for path in (tmp_path / "tensorboard").iterdir()]


def test_the_first_rank_writes_and_the_others_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    other = io.StringIO()
    sinks = open_sinks(tmp_path, rank=1, total_steps=4, stream=other)
    sinks.write(_row(1))
    sinks.close()
    assert list(tmp_path.iterdir()) == []
    assert other.getvalue() == ""
    stream = io.StringIO()
    sinks = open_sinks(tmp_path, rank=0, total_steps=4, stream=stream)
    sinks.write(_row(1))
    sinks.close()
    assert "step 1/4" in stream.getvalue()
    assert read_rows(tmp_path / "metrics.jsonl") == [_row(1)]
    sinks = open_sinks(tmp_path, rank=0, total_steps=4, stream=stream, keep_through=1)
    sinks.write(_row(2))
    sinks.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [_row(1), _row(2)]


def test_the_picture_shows_loss_and_bits_per_byte(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    rows = [*(_row(step, 8 / step) for step in range(1, 20)), {"step": 19, "bits_per_byte": 2.0}]
    pictures = []
    for kept in ([], rows[:-1], rows, [*rows, _row(20, None)]):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        plot_loss(path, tmp_path / "loss.png")
        pictures.append((tmp_path / "loss.png").read_bytes())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    # Nothing, the loss, and the bits per byte each change the picture; a gap does not.
    assert len(set(pictures[:3])) == 3
    assert pictures[2] == pictures[3]


def test_memory_in_use_is_that_of_what_is_alive_however_it_was_fragmented():
    """Small blocks stay with the process once they are free: the last one holds the heap's end."""
    device, block = torch.device("cpu"), 64 * 2**10
    before = memory_mib(device)
    blocks = [torch.zeros(block, dtype=torch.uint8) for _ in range(1024)]
    full = memory_mib(device)
    last = blocks.pop()
    blocks.clear()
    after = memory_mib(device)
    assert full - before == pytest.approx(64, abs=4)
    assert after - before == pytest.approx(0, abs=4)
    assert last.numel() == block
