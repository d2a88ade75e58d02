"""The recorded run: lines from metrics and events, and the page, which has what the file holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.toml import load_config
from record_resilient_run import (
    CONFIG,
    DEGREES,
    FIRST,
    PAGE,
    RANKS,
    RECORDING,
    SECOND,
    filled,
    join_command,
    processes,
)
from recorded_run import (
    KILLED,
    UNDISTURBED,
    Event,
    Line,
    events_of,
    furthest_apart,
    lines_of,
    load,
    save,
    shapes,
    steps_of,
    summary,
)
from recorded_run_picture import curve, draw, marks

LOG = """\
INFO rank 0 pcomm.train: encoded 579 documents
WARNING rank 0 pcomm.train: a rank R that has died comes back by the same command with: \
--store 127.0.0.1:44783 --rank R
WARNING rank 0 pcomm.train: rank 0 of 8 is process 3555
WARNING rank 2 pcomm.train: rank 2 of 8 is process 3557
WARNING rank 0 pcomm.train: generation 0 after step 0: 8 ranks, tp 4/4, in 0.96 s (the job starts)
"""


def row(step: int, wall_s: float, ranks: int, degrees: tuple[int, ...]) -> dict[str, float]:
    """A step of 100 tokens that took half a second by itself."""
    own = {f"tp.{replica}": float(degree) for replica, degree in enumerate(degrees)}
    told = {"step": step, "loss": 5 - step / 8, "tokens_per_s": 200.0, "step_ms": 500.0}
    return {**told, "wall_s": wall_s, "ranks": float(ranks), **own}


METRICS = [
    row(1, 1000.5, 4, (2, 2)),
    {"step": 1, "bits_per_byte": 2.0},
    row(2, 1001.0, 4, (2, 2)),
    row(3, 1003.0, 3, (1, 2)),
    row(4, 1003.5, 3, (1, 2)),
    row(5, 1004.0, 4, (2, 2)),
]
EVENTS = [Event(1001.25, "rank 1 killed"), Event(1003.25, "rank 1 started again")]
ALONE = [row(step, 2000 + step / 2, 4, (2, 2)) for step in range(1, 6)]


@pytest.fixture
def lines() -> list[Line]:
    return [*lines_of(UNDISTURBED, ALONE), *lines_of(KILLED, METRICS, EVENTS)]


def test_lines_have_seconds_since_the_first_step_and_events_between(lines):
    killed = [line for line in lines if line.run == KILLED]
    assert [(line.seconds, line.step, line.event) for line in killed] == [
        (0.5, 1, ""),
        (1.0, 2, ""),
        (1.25, 2, "rank 1 killed"),
        (3.0, 3, ""),
        (3.25, 3, "rank 1 started again"),
        (3.5, 4, ""),
        (4.0, 5, ""),
    ]
    # The recovery is part of the third step's two seconds.
    steps = steps_of(lines, KILLED)
    assert [line.tokens_per_s for line in steps] == [200, 200, 50, 200, 200]
    assert [line.degrees for line in steps] == ["2/2", "2/2", "1/2", "1/2", "2/2"]
    assert [line.ranks for line in steps] == [4, 4, 3, 3, 4]
    assert [line.degrees for line in shapes(lines)] == ["2/2", "1/2", "2/2"]


def test_a_recording_is_read_as_it_was_written(lines, tmp_path):
    save(tmp_path / "run.csv", lines, {"cores": "2", "command": "python x"})
    assert load(tmp_path / "run.csv") == (lines, {"cores": "2", "command": "python x"})


def test_losses_are_compared_step_by_step(lines):
    assert furthest_apart(lines) == (0.0, 1)
    other = [replace(one, loss=0.5) if one == steps_of(lines, KILLED)[3] else one for one in lines]
    assert furthest_apart(other) == (4.0, 4)
    with pytest.raises(ValueError, match="4 and 5 steps"):
        furthest_apart([line for line in lines if line != steps_of(lines, KILLED)[1]])


def test_the_summary_tells_events_and_shapes_in_the_order_of_time(lines):
    text = summary(lines, {"cores": "2", "date": "2026-11-22", "command": "python x"})
    assert text.splitlines()[2:7] == [
        "| 0.5 | 1 | 4 ranks train, degrees 2/2 | 200 |",
        "| 1.2 | after 2 | rank 1 killed | |",
        "| 3.0 | 3 | 3 ranks train, degrees 1/2 | 200 |",
        "| 3.2 | after 3 | rank 1 started again | |",
        "| 4.0 | 5 | 4 ranks train, degrees 2/2 | - |",
    ]
    assert text.endswith("\nRecorded on 2026-11-22: cores 2.\n")


def test_the_picture_marks_events_and_growth(lines, tmp_path):
    found = [(1.25, "rank 1 killed"), (3.25, "rank 1 started again"), (4.0, "4 ranks again")]
    assert marks(lines) == found
    assert curve(lines, KILLED, "seconds", "tokens_per_s") == (
        [0.5, 1.0, 3.0, 3.5, 4.0],
        [200, 200, 50, 200, 200],
    )
    draw(lines, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_processes_and_the_command_to_join_are_in_the_log():
    assert processes(LOG) == {0: 3555, 2: 3557}
    assert join_command(LOG, 2) == ["--store", "127.0.0.1:44783", "--rank", "2"]
    with pytest.raises(ValueError, match="no command to join"):
        join_command("", 2)


def test_the_page_has_what_the_recording_holds():
    page = PAGE.read_text()
    text = summary(*load(RECORDING))
    assert text in page
    assert filled(page, text) == page, "run `python tools/record_resilient_run.py --page`"
    assert f"../benchmarks/{RECORDING.stem}.png" in page
    assert RECORDING.with_suffix(".png").is_file()


def test_the_recording_is_of_the_run_that_the_page_describes():
    lines, origin = load(RECORDING)
    config = load_config(CONFIG)
    validate_resilient(config, RANKS)
    assert origin["command"] == "python tools/record_resilient_run.py"
    for run in (KILLED, UNDISTURBED):
        steps = [line.step for line in steps_of(lines, run)]
        assert steps == list(range(1, config.train.steps + 1))
    assert [line.degrees for line in shapes(lines)] == DEGREES
    assert {line.degrees for line in steps_of(lines, UNDISTURBED)} == {DEGREES[0]}
    texts = [f"rank {FIRST} killed", f"rank {SECOND} killed", f"rank {FIRST} started again"]
    assert [line.event for line in events_of(lines)] == texts
    # fp32 with sums in another order: far less than what a wrong batch or learning rate changes.
    assert furthest_apart(lines)[0] < 1e-4
