"""`pcomm bench gdn-cp` on gloo ranks: what each form sends, and the command from end to end."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gdn_cp_bench import measure
from gdn_cp_bench.exchange_case import WIDTHS, CaseTensors, ExchangeCase
from gdn_cp_bench.measure import check_and_count
from pcomm.core.cli import main
from pcomm.core.groups.group import Group
from pcomm.core.testing.on_ranks import ranks

PACKS = {1: (0, 64), 5: (0, 8, 24, 32, 56, 64)}
# W_in with z, and the columns of the output, which come back.
W_IN, V = sum(WIDTHS), WIDTHS[3]


def check_counts(num_sequences: int) -> None:
    assert dist.group.WORLD is not None
    group = Group.from_process_group("cp", dist.group.WORLD).collectives
    numbers = CaseTensors(PACKS[num_sequences], group.rank, group.size)
    found = {
        name: check_and_count(name, numbers, group)
        for name in ("loop", "split loop", "fused", "heads", "docs", "gather")
    }
    calls = {name: (counted.forward, counted.backward) for name, counted in found.items()}
    assert calls["loop"] == calls["split loop"] == (7 * num_sequences, 7 * num_sequences)
    # There and back, forward, and the same in backward.
    assert calls["fused"] == calls["heads"] == (2, 2)
    assert calls["gather"] == (1, 1)
    sent = {name: counted.sent_bytes for name, counted in found.items()}
    local = 64 // group.size
    others = (group.size - 1) * 4
    assert sent["fused"] == 2 * local * (W_IN + V) * others // group.size
    assert sent["loop"] == sent["split loop"] == sent["fused"]
    # z stays, so as many columns go away as the output brings back.
    assert sent["heads"] * (W_IN + V) == sent["fused"] * W_IN


@pytest.mark.parametrize("num_sequences", PACKS)
@ranks(2)
def test_two_ranks_send_what_the_formulas_say(rank: int, num_sequences: int) -> None:
    check_counts(num_sequences)


@pytest.mark.parametrize("num_sequences", PACKS)
@ranks(4)
def test_four_ranks_send_what_the_formulas_say(rank: int, num_sequences: int) -> None:
    check_counts(num_sequences)


@ranks(2)
def test_a_wrong_result_on_one_rank_stops_all(rank: int) -> None:
    assert dist.group.WORLD is not None
    group = Group.from_process_group("cp", dist.group.WORLD).collectives
    numbers = CaseTensors(PACKS[1], rank, 2)
    build = measure.build_form

    def broken(name: str, of: CaseTensors, collectives: object) -> ExchangeCase | None:
        case = build(name, of, collectives)  # type: ignore[arg-type]
        if case is not None and rank == 1:
            case.leaves[0].data[0, 0] += 1.0
        return case

    measure.build_form = broken  # type: ignore[assignment]
    try:
        with pytest.raises(AssertionError, match=r"tensor 0 is off|another rank is wrong"):
            check_and_count("heads", numbers, group)
    finally:
        measure.build_form = build
    # Nobody is left waiting.
    assert float(group.all_reduce(torch.ones(1))) == 2.0


def test_a_quick_run_writes_its_rows_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it draws the picture, and is no requirement")
    rows, image = tmp_path / "gdn_cp.csv", tmp_path / "new" / "times.png"
    sizes = ["--quick", "--ranks", "2", "--sequences", "1,3", "--tokens", "64", "--no-plans"]
    line = ["bench", "gdn-cp", *sizes, "--csv", str(rows), "--plot", str(image)]
    assert main([*line, "--debug"]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["benchmark"] for row in found} == {"gdn-cp"}
    by_case = {(row["case"], row["unit"]): row for row in found}
    place = "cp 2, 3 random sequences"
    assert by_case[f"loop @ {place}", "collectives"]["value"] == "42"
    assert by_case[f"heads @ {place}", "collectives"]["value"] == "4"
    megabytes = by_case[f"heads @ {place}", "MB"]
    assert megabytes["ratio_to"] == f"fused @ {place}"
    assert float(megabytes["ratio"]) == round(W_IN / (W_IN + V), 3)
    times = [row for row in found if row["unit"] == "ms"]
    assert len(times) == 3 * 7
    assert all(float(row["value"]) > 0 and row["rounds"] == "3" for row in times)
    assert by_case[f"loop @ {place}", "ms"]["ratio_to"] == f"heads @ {place}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "3"], "4 key heads"),
        (["--ranks", "1"], "above 1 that divide 4"),
        (["--ranks", "2;4"], "words that are no numbers"),
        (["--tokens", "100"], "a multiple of 8"),
        (["--tokens", "64", "--sequences", "9"], "at least 72"),
        (["--sequences", "0"], "a pack without sequences"),
        (["--rounds", "2"], "fewer than 3 rounds"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gdn-cp", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: pcomm bench gdn-cp --")
    assert told in error


def test_torchrun_decides_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["bench", "gdn-cp", "--ranks", "2,4"]) == 2
    assert "4 processes, started by torchrun" in capsys.readouterr().err
