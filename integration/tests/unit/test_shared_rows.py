"""Rows of a run whose ranks take turns in writing them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pcomm.integration.metrics.sinks import SharedRows


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[SharedRows]]:
    """Two ranks of one run, in the same process."""
    one, two = (SharedRows(tmp_path, total_steps=9, stream=io.StringIO()) for _ in range(2))
    with closing(one), closing(two):
        yield [one, two]


def do_steps(ranks: list[SharedRows], *steps: int, writes: bool = True) -> None:
    """Steps of all ranks; without `writes` nothing comes after the last note."""
    for step in steps:
        for rows in ranks:
            rows.note({"step": step, "loss": float(step)})
        for rows in ranks if writes else []:
            rows.write({"step": step, "loss": float(step)})


def enter(ranks: list[SharedRows], step: int, *, writer: int) -> None:
    for rank, rows in enumerate(ranks):
        rows.enter(step, is_writer=rank == writer)


def written(folder: Path) -> list[tuple[int, str]]:
    """Step and kind of each row."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row.pop("step"), *row) for row in rows]


def losses(*steps: int) -> list[tuple[int, str]]:
    return [(step, "loss") for step in steps]


def test_one_of_them_writes(ranks, tmp_path):
    enter(ranks, 0, writer=0)
    do_steps(ranks, 1, 2)
    assert written(tmp_path) == losses(1, 2)
    enter(ranks, 2, writer=1)
    do_steps(ranks, 3)
    assert [rows.is_writer for rows in ranks] == [False, True]
    assert written(tmp_path) == losses(1, 2, 3)


@pytest.mark.parametrize("writer", [0, 1])
def test_the_next_writer_adds_the_row_of_a_step_that_was_applied(writer, ranks, tmp_path):
    enter(ranks, 0, writer=0)
    do_steps(ranks, 1)
    do_steps(ranks, 2, writes=False)
    enter(ranks, 2, writer=writer)
    assert written(tmp_path) == losses(1, 2)
    do_steps(ranks, 3)
    assert written(tmp_path) == losses(1, 2, 3)


def test_a_step_that_was_not_applied_gets_no_row(ranks, tmp_path):
    enter(ranks, 0, writer=0)
    do_steps(ranks, 1)
    do_steps(ranks, 2, writes=False)
    enter(ranks, 1, writer=1)
    assert written(tmp_path) == losses(1)


def test_a_row_that_was_torn_is_written_again(ranks, tmp_path):
    enter(ranks, 0, writer=0)
    do_steps(ranks, 1, 2)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-3])
    enter(ranks, 2, writer=1)
    assert written(tmp_path) == losses(1, 2)


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("step", [0, 2])
def test_steps_that_are_repeated_lose_their_rows(step, writer, ranks, tmp_path):
    enter(ranks, 0, writer=0)
    do_steps(ranks, 1, 2, 3)
    ranks[0].write({"step": 3, "bits_per_byte": 1.0})
    enter(ranks, step, writer=writer)
    assert written(tmp_path) == losses(*range(1, step + 1))
    do_steps(ranks, *range(step + 1, 4))
    ranks[writer].write({"step": 3, "bits_per_byte": 1.0})
    assert written(tmp_path) == [*losses(1, 2, 3), (3, "bits_per_byte")]


def test_an_evaluation_that_is_repeated_has_one_row(ranks, tmp_path):
    enter(ranks, 0, writer=0)
    do_steps(ranks, 1)
    for writer in (0, 1, 1):
        enter(ranks, 1, writer=writer)
        ranks[writer].write({"step": 1, "bits_per_byte": 1.0})
    assert written(tmp_path) == [*losses(1), (1, "bits_per_byte")]
