"""The table of thresholds: its file, what is refused in it, and tables with other rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
from pcomm.nvls.policy import table as table_module
from pcomm.nvls.policy.bands import Band, Row
from pcomm.nvls.policy.operations import OPERATIONS
from pcomm.nvls.policy.table import Table

SHIPPED = Table.load()
FILE = Path(table_module.__file__).with_name("table.json")
ROW = Row("p2p", 64, 4, 8, "by hand")
ARCHITECTURES = ["sm_90", "sm_100", "sm_103", "emulated"]


def test_the_file_of_the_package_is_what_dump_writes(tmp_path: Path) -> None:
    SHIPPED.dump(tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == FILE.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert "not measured by pcomm" in SHIPPED.about


ROWS = st.builds(
    lambda max_bytes, blocks, warps, source: Row("lamport", max_bytes, blocks, warps, source),
    st.integers(0, 1 << 50),
    st.integers(1, 32),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.text(),
)
BANDS = st.builds(
    lambda architectures, operations, least, more, row: Band(
        tuple(architectures), tuple(operations), (least, least + more), (row, *row_of_dist(row))
    ),
    st.lists(st.text(min_size=1), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(list(OPERATIONS)), min_size=1, unique=True),
    st.integers(2, 80),
    st.integers(0, 80),
    ROWS,
)


def row_of_dist(row: Row) -> tuple[Row, ...]:
    return (Row("dist", row.max_bytes, 0, 0, row.source),) if row.max_bytes % 2 else ()


@given(st.lists(BANDS, max_size=1), st.text())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, bands: list[Band], about: str
) -> None:
    table = Table(tuple(bands), about)
    path = tmp_path_factory.getbasetemp() / "drawn.json"
    table.dump(path)
    read = Table.load(path)
    assert read == table
    assert read.digest == table.digest


@pytest.fixture
def table_path(tmp_path: Path) -> Path:
    return tmp_path / "table.json"


# -- mutations of the file ------------------------------------------------------------------------


def renamed(content: dict[str, Any], old: str, new: str) -> None:
    content[new] = content.pop(old)


MUTATIONS: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "unknown key": (lambda t: t.update(abuot=""), "the key 'abuot'", "'about'"),
    "unknown key of a band": (
        lambda t: renamed(t["bands"][0], "rows", "row"),
        "bands[0] has the key 'row'",
        "'rows'",
    ),
    "unknown key of a row": (
        lambda t: renamed(t["bands"][1]["rows"][2], "max_bytes", "max_byte"),
        "bands[1].rows[2] has the key 'max_byte'",
        "'max_bytes'",
    ),
    "missing key": (
        lambda t: t["bands"][0]["rows"][0].pop("source"),
        "bands[0].rows[0] has no 'source'",
        "Add 'source'",
    ),
    "another version": (lambda t: t.update(version=2), "version 2", "version 1"),
    "a version that is no number": (lambda t: t.update(version=True), "version = True", "int"),
    "a band that is a list": (lambda t: t["bands"].append([]), "is []", "an object"),
    "a row that is text": (lambda t: t["bands"][0]["rows"].append(""), "rows[3] is ''", "object"),
    "a size with a fraction": (
        lambda t: t["bands"][0]["rows"][0].update(max_bytes=1.5),
        "bands[0].rows[0].max_bytes = 1.5",
        "int",
    ),
    "a size below zero": (
        lambda t: t["bands"][0]["rows"][0].update(max_bytes=-1),
        "bands[0].rows[0]: max_bytes=-1",
        "from 0 on",
    ),
    "unknown algorithm": (
        lambda t: t["bands"][0]["rows"][0].update(algorithm="lamprot"),
        "algorithm 'lamprot'",
        "'lamport'",
    ),
    "no blocks": (
        lambda t: t["bands"][0]["rows"][0].update(num_blocks=0),
        "num_blocks=0",
        "1 to 32",
    ),
    "33 blocks": (
        lambda t: t["bands"][0]["rows"][0].update(num_blocks=33),
        "num_blocks=33",
        "1 to 32",
    ),
    "three warps": (lambda t: t["bands"][0]["rows"][0].update(num_warps=3), "num_warps=3", "16"),
    "blocks of dist": (
        lambda t: t["bands"][0]["rows"][0].update(algorithm="dist"),
        "num_blocks=4, num_warps=8 for dist",
        "0 for both",
    ),
    "unknown operation": (
        lambda t: t["bands"][0]["operations"].append("all_gather"),
        "bands[0]: operation 'all_gather'",
        "'all_gather_v'",
    ),
    "an operation that is no text": (
        lambda t: t["bands"][0]["operations"].append(1),
        "bands[0].operations",
        "type str",
    ),
    "no architecture": (
        lambda t: t["bands"][0].update(architectures=[]),
        "no architecture",
        "at least one",
    ),
    "three world sizes": (
        lambda t: t["bands"][0].update(world_sizes=[2, 3, 4]),
        "world_sizes = [2, 3, 4]",
        "two numbers",
    ),
    "world sizes the other way round": (
        lambda t: t["bands"][0].update(world_sizes=[4, 3]),
        "world sizes 4 to 3",
        "from 2 on",
    ),
    "one rank": (lambda t: t["bands"][0].update(world_sizes=[1, 2]), "sizes 1 to 2", "from 2 on"),
    "a row that is never reached": (
        lambda t: t["bands"][0]["rows"].append(dict(t["bands"][0]["rows"][0])),
        "after a row of lamport that is as large",
        "ascending",
    ),
    "overlapping bands": (
        lambda t: t["bands"][0].update(world_sizes=[2, 3]),
        "bands for 2 to 3 and for 3 to 4 ranks",
        "do not overlap",
    ),
    "the same band twice": (
        lambda t: t["bands"].append(dict(t["bands"][0])),
        "bands for 2 to 2 and for 2 to 2 ranks",
        "Remove one",
    ),
    "an architecture twice in a band": (
        lambda t: t["bands"][0]["architectures"].append("sm_90"),
        "bands for 2 to 2 and for 2 to 2 ranks",
        "Remove one",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_file_is_read_strictly(name: str, table_path: Path) -> None:
    mutate, found, fix = MUTATIONS[name]
    content = json.loads(FILE.read_text())
    mutate(content)
    table_path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as problem:
        Table.load(table_path)
    assert found in problem.value.found
    assert fix in problem.value.fix


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "JSONDecodeError"),
        ('{"version": 1, "version": 1}', "'version' stands twice"),
        ("[]", "the file is []"),
        ("[" * 100_000, "RecursionError"),
        (None, "FileNotFoundError"),
    ],
)
def test_what_is_no_table_is_an_error(text: str | None, found: str, table_path: Path) -> None:
    if text is not None:
        table_path.write_text(text)
    with pytest.raises(ConfigError, match="is read strictly") as problem:
        Table.load(table_path)
    assert found in problem.value.found
    assert str(table_path) in problem.value.asked


def test_a_table_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    path.write_text("old")

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        SHIPPED.dump(path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["table.json"]


def test_launches_up_to_the_pad_and_the_largest_block() -> None:
    for blocks, warps in product(range(-1, 40), range(-1, 40)):
        # torch's default pad has 32 blocks; a block has up to 1024 threads, in warps of 32.
        is_launch = 1 <= blocks <= 32 and (32 * warps) in (32, 64, 128, 256, 512, 1024)
        with nullcontext() if is_launch else pytest.raises(ConfigError):
            assert replace(ROW, num_blocks=blocks, num_warps=warps).num_warps == warps


def test_barriers_have_a_thread_for_each_rank() -> None:
    for name, warps, ranks in product(("lamport", "multimem", "p2p"), (1, 2, 4), range(2, 140)):
        row = Row(name, 64, 4, warps, "by hand")  # type: ignore[arg-type]
        # Thread r of a block waits for rank r; data without a barrier are waited for one by one.
        is_heard = name == "lamport" or ranks <= 32 * warps
        with nullcontext() if is_heard else pytest.raises(ConfigError, match="a thread for each"):
            Band(("sm_90",), ("all_reduce",), (2, ranks), (row,))


# -- other rows -----------------------------------------------------------------------------------


@given(
    st.sampled_from([*ARCHITECTURES, "sm_120"]),
    st.sampled_from(list(OPERATIONS)),
    st.integers(2, 80),
    st.integers(0, 80),
)
def test_other_rows_at_one_place_change_no_other(
    architecture: str, operation: str, least: int, more: int
) -> None:
    place = (least, least + more)
    tuned = SHIPPED.with_rows(architecture, operation, place, [ROW])
    for other in [*ARCHITECTURES, "sm_120"]:
        for name in (operation, *set(list(OPERATIONS)[:3])):
            for size in {2, 3, 4, 8, 9, 72, 73, least - 1, least, least + more, least + more + 1}:
                is_there = (other, name) == (architecture, operation) and place[0] <= size <= place[
                    1
                ]
                rows = (ROW,) if is_there else SHIPPED.rows(other, name, size)
                assert tuned.rows(other, name, size) == rows
    assert tuned.digest != SHIPPED.digest
    assert tuned.about == SHIPPED.about


def test_the_digest_is_of_what_choices_depend_on() -> None:
    band = Band(
        ("sm_90",), ("all_reduce", "all_gather_v"), (2, 8), (ROW, replace(ROW, max_bytes=96))
    )
    table = Table((band,))
    apart = Table(
        (replace(band, operations=("all_gather_v",)), replace(band, operations=("all_reduce",))),
        about="the same in two bands",
    )
    told = Table((replace(band, rows=tuple(replace(row, source="x") for row in band.rows)),))
    assert table.digest == apart.digest == told.digest
    others = [
        replace(band, architectures=("sm_100",)),
        replace(band, operations=("all_reduce",)),
        replace(band, world_sizes=(2, 9)),
        replace(band, rows=band.rows[:1]),
        *(
            replace(band, rows=(replace(ROW, **{key: value}), band.rows[1]))
            for key, value in [
                ("algorithm", "multimem"),
                ("max_bytes", 65),
                ("num_blocks", 5),
                ("num_warps", 4),
            ]
        ),
    ]
    digests = {Table((other,)).digest for other in others}
    assert len(digests) == len(others)
    assert table.digest not in digests


def test_the_digest_is_the_same_in_every_process_and_needs_no_torch() -> None:
    code = """
import sys
from pcomm.nvls.policy import chooser, table
print(table.Table.load().digest, "torch" in sys.modules)
"""
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.split() == [SHIPPED.digest, "False"]
