"""The benchmark: its arithmetic on made-up times, and what it does without a GPU."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from core_bench.runner import NOT_HERE
from nvls_bench.between_gpus import (
    RankTime,
    bytes_of,
    divided_sizes,
    least_us,
    rank_rows,
    rows_from_times,
    tuned_bands,
)
from nvls_bench.command import PARTS, command
from nvls_bench.on_host import BASELINES, DECISION, recorded_launches
from pcomm.core.errors import ConfigError
from pcomm.nvls.policy.table import OPERATIONS, Band, Table, Threshold

MIB = 1 << 20


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def times(operation: str, by_size: dict[int, dict[str, float]], world: int = 8) -> list[RankTime]:
    return [
        RankTime(operation, algorithm, num_bytes, world, microseconds)
        for num_bytes, found in by_size.items()
        for algorithm, microseconds in found.items()
    ]


def test_bytes_on_the_links() -> None:
    # Of 8 ranks and a tensor of 8 units, from the table in NVIDIA/nccl issue 1083.
    assert bytes_of("all_gather_into_tensor", "multimem", 8, 8) == (1, 8)
    assert bytes_of("reduce_scatter_tensor", "multimem", 8, 8) == (8, 1)
    assert bytes_of("all_reduce", "multimem", 8, 8) == (9, 9)
    assert bytes_of("all_gather_into_tensor", "p2p", 8, 8) == (7, 7)
    assert bytes_of("all_reduce", "torch.distributed", 8, 8) == (14, 14)
    with pytest.raises(ConfigError, match="gather_to_rank"):
        bytes_of("gather_to_rank", "p2p", 8, 8)
    least = least_us("all_reduce", "multimem", 8 * MIB, 8, rate=450e9, latency_us=2)
    assert least == pytest.approx(2 + 9 * MIB / 450e9 * 1e6)


def test_sizes_can_be_divided_among_any_number_of_ranks() -> None:
    assert divided_sizes([1 << 13, 1 << 20], 8) == [1 << 13, 1 << 20]
    assert divided_sizes([1, 48, 49, 1 << 13], 3) == [48, 96, 8208]


def test_thresholds_follow_from_the_fastest() -> None:
    before = Table().rows("sm_90", "all_reduce", 8)
    found = times(
        "all_reduce",
        {
            1024: {"lamport": 4, "multimem": 6, "torch.distributed": 20},
            2048: {"lamport": 5, "multimem": 6, "torch.distributed": 20},
            4096: {"lamport": 7, "multimem": 6, "torch.distributed": 20},
            8192: {"multimem": 9, "torch.distributed": 8},
            16384: {"multimem": 10, "torch.distributed": 12},
            32768: {"multimem": 30, "torch.distributed": 20},
        },
    )
    rows = rows_from_times("all_reduce", found, before, source="a test")
    assert [(row.algorithm, row.max_bytes) for row in rows] == [
        ("lamport", 2048),
        ("multimem", 4096),
        ("dist", 8192),
        ("multimem", 16384),
    ]
    grids = {row.algorithm: (row.num_blocks, row.num_warps) for row in before[::-1]}
    assert (rows[0].num_blocks, rows[0].num_warps) == grids["lamport"]
    assert {row.source for row in rows} == {"a test"}


def test_bands_of_what_was_measured_alone() -> None:
    found = [
        RankTime("barrier", "p2p", 16, 8, 2.0),
        *times("reduce_scatter_tensor", {8 * MIB: {"p2p": 30, "torch.distributed": 40}}),
        *times("all_reduce", {MIB: {"p2p": 40, "torch.distributed": 30}}),
    ]
    scatter, reduce = tuned_bands("sm_90", found, source="a test")
    # The message of a reduce-scatter is one segment.
    assert [(row.algorithm, row.max_bytes) for row in scatter.rows] == [("p2p", MIB)]
    # Nothing was faster than torch.distributed.
    assert [(row.algorithm, row.max_bytes) for row in reduce.rows] == [("dist", MIB)]
    assert (scatter.operations, scatter.world_sizes) == (("reduce_scatter_tensor",), (8, 8))
    # What is printed can be pasted into a program.
    assert eval(repr(scatter), {"Band": Band, "Threshold": Threshold}) == scatter


def test_rows_of_ranks_have_their_ratios() -> None:
    found = [
        RankTime("barrier", "multimem", 16, 8, 2.0),
        RankTime("barrier", "p2p", 16, 8, 3.0),
        *times("all_reduce", {450_000 * 8: {"multimem": 22.0, "torch.distributed": 44.0}}),
    ]
    place = "all_reduce, 3600000 bytes, 8 ranks"
    rows = {(row.case, row.unit): row for row in rank_rows(found, "sm_90")}
    ours = rows[f"multimem @ {place}", "us"]
    assert (ours.value, ours.ratio) == (22.0, 0.5)
    assert ours.ratio_to == f"torch.distributed @ {place}"
    assert rows[ours.ratio_to, "us"].ratio is None
    assert rows[f"multimem @ {place}", "GB/s"].value == pytest.approx(163.636)
    # 2 us, and 9 / 8 of 3.6 MB at 450 GB/s: 9 us more.
    assert rows[f"multimem @ {place}", "of the limit"].value == pytest.approx(11 / 22)
    assert not [key for key in rank_rows(found, "sm_80") if key.unit == "of the limit"]


def test_every_operation_and_algorithm_has_a_launch() -> None:
    launches = recorded_launches(8, 90)
    wanted = {(name, algo) for name, spec in OPERATIONS.items() for algo in spec.algorithms}
    assert set(launches) == wanted
    for (_, algorithm), launch in launches.items():
        way = launch.arguments.get("WAY", "peers")
        assert algorithm == "lamport" or way == (
            "multicast" if algorithm == "multimem" else "peers"
        )
        assert ("lamport" in launch.kernel.__name__) == (algorithm == "lamport")


def test_a_quick_run_writes_its_rows(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    assert run("--quick", "--csv", str(table)) == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    host = [row for row in rows if row["benchmark"] == "nvls host"]
    cases = sorted([*BASELINES, *BASELINES.values(), DECISION])
    assert sorted(row["case"] for row in host) == cases
    assert {row["case"]: row["ratio_to"] for row in host if row["ratio"]} == BASELINES
    kernels = {row["case"]: row for row in rows if row["benchmark"] == "nvls compile"}
    number = sum(len(spec.algorithms) for spec in OPERATIONS.values())
    assert len(kernels) == 5 * number
    assert kernels["registers @ all_reduce, multimem, sm_90"]["unit"] == "of a thread"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("part", ["ranks", "one-gpu"])
def test_parts_for_gpus_say_that_there_is_none(part, tmp_path, capsys):
    assert run("--parts", part, "--csv", str(tmp_path / "rows.csv")) == NOT_HERE
    told = capsys.readouterr().err
    assert "GPU" in told
    assert f"--parts {part}" in told
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match="hosts"):
        run("--parts", "hosts")
    with pytest.raises(ConfigError, match="Add --parts ranks"):
        run("--tune")
    with pytest.raises(ConfigError, match="--rounds 3"):
        run("--rounds", "3")
    assert "ranks" in PARTS
