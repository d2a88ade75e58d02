"""`pcomm bench gdn-cp` from end to end: each form is checked before it is timed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gdn_cp_bench.exchange_case import SPEC, WIDTHS
from gdn_cp_bench.sent_bytes import COUNTED, LayerShape, sent_bytes
from gdn_cp_bench.settings import HIDDEN_DIM, Settings
from pcomm.core.cli import main


def test_a_quick_run_writes_its_rows_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it draws the picture, and is no requirement")
    rows, image = tmp_path / "gdn_cp.csv", tmp_path / "new" / "gdn_cp.png"
    sizes = ["--quick", "--ranks", "2", "--sequences", "1,3", "--tokens", "64", "--no-plans"]
    line = ["bench", "gdn-cp", *sizes, "--csv", str(rows), "--plot", str(image.parent)]
    assert main([*line, "--debug"]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["benchmark"] for row in found} == {"gdn-cp"}
    by_case = {(row["case"], row["unit"]): row for row in found}
    place = "cp 2, 3 random sequences"
    assert by_case[f"loop @ {place}", "collectives"]["value"] == "42"
    assert by_case[f"heads @ {place}", "collectives"]["value"] == "4"
    assert by_case[f"heads @ {place}", "MB"]["ratio_to"] == f"fused @ {place}"
    # z stays, so as many columns go away as the output brings back.
    ratio = float(by_case[f"heads @ {place}", "MB"]["ratio"])
    assert ratio == round(sum(WIDTHS) / (sum(WIDTHS) + WIDTHS[3]), 3)
    # Bytes by arithmetic are those that are counted.
    packs = {pack.label: pack for pack in Settings(ranks=(2,), tokens=64, sequences=(1, 3)).packs()}
    pack, shape = packs["3 random sequences"].cu_seqlens, LayerShape(SPEC, HIDDEN_DIM, 4)
    for form in COUNTED:
        if row := by_case.get((f"{form} @ {place}", "MB")):
            assert float(row["value"]) == pytest.approx(
                sent_bytes(form, shape, pack, 2) / 1e6, rel=0.01
            )
    times = [row for row in found if row["unit"] == "ms"]
    assert len(times) == 3 * 7
    assert all(float(row["value"]) > 0 and row["rounds"] == "3" for row in times)
    assert by_case[f"loop @ {place}", "ms"]["ratio_to"] == f"heads @ {place}"
