"""Where the numbers of a run go: file, terminal, TensorBoard."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from integration_support.short_runs import tiny_run
from pcomm.core.errors import ConfigError
from pcomm.integration.config.rules import validate
from pcomm.integration.config.toml import load_config
from pcomm.integration.data.preparation import open_prepared
from pcomm.integration.data.tokenizer import load_tokenizer
from pcomm.integration.metrics import trackers
from pcomm.integration.metrics.picture import smoothed
from pcomm.integration.metrics.progress import ProgressSink, duration
from pcomm.integration.metrics.rows import FIELDS, JsonLinesSink, bits_per_byte, read_rows
from pcomm.integration.metrics.sinks import SinkGroup, open_sinks
from pcomm.integration.train.loop import batches_of
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
    sink.write(
        _row(
            1, 7.12345, train_bits_per_byte=3.0, tokens_per_s=12345.6, memory_mib=512.4, mfu=0.45678
        )
    )
    sink.write({"step": 1, "bits_per_byte": 4.5678})
    sink.write(
        _row(2, 6.5, train_bits_per_byte=2.0, mean_tokens_per_s=99.0, memory_mib=9.0, mfu=1.14)
    )
    sink.close()
    _, first, second = stream.getvalue().split("\r")
    assert first == (
        "step   1/100  loss 3.000 bits/byte  12,346 tokens/s  45.7% of peak  ETA 3:18  "
        "512 MiB in use"
    )
    # Means of the last steps, which are 3 and 2 with the weights 0.95 and 1.
    assert second.rstrip() == (
        "step   2/100  loss 2.487 bits/byte  held-out 4.568 bits/byte  99 tokens/s  "
        "above the peak  ETA 3:16  9 MiB in use"
    )
    assert second.endswith("\n")
    # A shorter line covers the longer one.
    stream = Terminal()
    sink = _progress(stream, [0, 0, 0], total_steps=9)
    sink.write(_row(1, memory_mib=123456))
    sink.write(_row(2))
    _, first, second = stream.getvalue().split("\r")
    assert "loss 2.000 nats/token" in first
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


def test_a_mean_is_that_of_tensorboards_curves():
    """Its formula, of the values that are finite; the others are shown and do not count."""
    values = [3.0, -1.0, 4.0, math.nan, 1.5, 9.0, 2.6]
    for weight in (0.0, 0.6, 0.95):
        found, finite = smoothed(values, weight), []
        for value, mean in zip(values, found, strict=True):
            if math.isnan(value):
                assert math.isnan(mean)
                continue
            finite.append(value)
            ema = 0.0
            for one in finite:
                ema = weight * ema + (1 - weight) * one
            assert mean == pytest.approx(ema / (1 - weight ** len(finite)), rel=1e-12)
    # By itself a short curve stays as it is, and a long one is the mean of a part of it.
    assert smoothed(values[:3]) == values[:3]
    jumps = [float(step % 2) for step in range(1000)]
    assert all(abs(mean - 0.5) < 0.05 for mean in smoothed(jumps)[200:])


class Writer:
    def __init__(self, *_, **options):
        self.calls, self.options = [], options

    def add_scalar(self, *call):
        if call[1] == 666:
            raise OSError("disk full")
        self.calls.append(call)

    def close(self):
        self.calls.append("closed")


def test_tensorboard_gets_each_number_in_its_group_at_its_step(tmp_path, monkeypatch, caplog):
    made = []
    module = SimpleNamespace(SummaryWriter=lambda *a, **k: made.append(Writer(**k)) or made[-1])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    sink = trackers.open_tensorboard(tmp_path, keep_through=2)
    sink.write(_row(3, lr=0.1, mfu=0.5, **{"tp.1": 2}))
    sink.write({"step": 3, "bits_per_byte": 1.5, "eval_s": 2.0, "new": 1.0})
    # A failure is told once, and neither the run nor the file of rows notices.
    for step in (4, 5):
        sink.write(_row(step, loss=666))
    sink.close()
    (writer,) = made
    assert writer.options == {"purge_step": 3}
    assert writer.calls == [
        ("train/loss", 2.0, 3),
        ("train/lr", 0.1, 3),
        ("speed/mfu", 0.5, 3),
        ("ranks/tp.1", 2, 3),
        ("eval/bits_per_byte", 1.5, 3),
        ("eval/eval_s", 2.0, 3),
        ("eval/new", 1.0, 3),
        "closed",
    ]
    assert caplog.text.count("TensorBoard gets no more rows (OSError: disk full)") == 1


def test_without_tensorboard_there_is_no_sink(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert trackers.open_tensorboard(tmp_path / "tensorboard") is None
    assert not (tmp_path / "tensorboard").exists()


def test_a_broken_tensorboard_is_told_and_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING, logger="pcomm"):
        assert trackers.open_tensorboard(tmp_path) is None
    assert "cannot be imported" in caplog.text


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = trackers.open_tensorboard(tmp_path / "tensorboard", keep_through=2)
    sink.write(_row(3))
    sink.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(3, 2.0)]


def test_the_first_rank_writes_and_the_others_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
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


@pytest.mark.parametrize("pattern", ["A", "AG"])
def test_training_has_the_unit_of_evaluations_and_every_number_is_described(tmp_path, pattern):
    """The oracle decodes the targets of the first batch, and counts the bytes of their text."""
    run = tiny_run(tmp_path, pattern, "train.eval_every=1", "data.held_out=0.3")
    rows = read_rows(run / "metrics.jsonl")
    first = rows[0]
    batch = batches_of(validate(load_config(run / "config.toml"), 1), open_prepared(run)).batch(0)
    targets, tokenizer = batch.targets[batch.targets >= 0], load_tokenizer(run / "tokenizer.json")
    text = "".join(tokenizer.decode([int(target)]) for target in targets)
    assert len(text) > 100
    bits = first["loss"] * len(targets) / math.log(2)
    assert first["train_bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-6)
    names = {name for row in rows for name in row}
    assert {"train_bits_per_byte", "bits_per_byte", "eval_s", "data_ms", "mfu"} < names
    assert names <= FIELDS.keys()
    tags = [field.tag for field in FIELDS.values()]
    assert len(set(tags)) == len(tags)


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
