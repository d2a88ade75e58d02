"""`pcomm bench fsdp` from end to end, with models that take no time."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from core_bench.rated_network import obstacle
from fsdp_bench.settings import FSDP2, NO_PAIRS, ONE, TUNED, TWO_RAILS, UNSHARDED
from pcomm.core.cli import main

# Three matrices of 512 x 512 in fp32 on two ranks, each of which sends half of a unit.
SHARE = 512 * 512 * 4 / 2 / (1 << 20)


@pytest.mark.soak
def test_the_command_measures_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := obstacle():
        pytest.skip(f"no rate-limited links here: {reason}")
    rows, image = tmp_path / "fsdp.csv", tmp_path / "new" / "fsdp.png"
    # What differs between all forms is shown elsewhere.
    keys = "fsdp2,fsdp2-tuned,ours-1-group,ours-no-pairs,ours-2-rails"
    line = ["bench", "fsdp", "--quick", "--models", "linear", "--forms", keys, "--debug"]
    line += ["--csv", str(rows)]
    # It draws the picture, and is no requirement.
    draws = find_spec("matplotlib") is not None
    assert main([*line, "--plot", str(image.parent)] if draws else line) == 0
    told = capsys.readouterr().out
    assert "x as fast:" in told
    assert "PREDICTION of a model, not measured" in told
    assert not draws or image.read_bytes().startswith(b"\x89PNG")
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    values = {(row["case"], row["unit"]): float(row["value"]) for row in found}
    assert {row["benchmark"] for row in found} == {"fsdp"}
    place = "2 ranks, linear, 2 Gbit/s, batch x4"
    # Three small units may take no longer alone than the link needs for their bytes.
    assert values.pop((f"a collective beyond its bytes @ {place}", "ms, in the prediction")) >= 0
    assert all(value > 0 for (_, unit), value in values.items() if unit.startswith("ms"))
    for case in (ONE, TWO_RAILS):
        at = f"{case} @ {place}"
        predicted = values[at, "ms, predicted"] / values[at, "ms"]
        # Both are rounded to 0.001, the former in ms.
        assert values[at, "predicted / measured"] == pytest.approx(predicted, abs=2e-3)
    others = (FSDP2, TUNED, NO_PAIRS)
    assert not any(
        "predict" in unit for (case, unit) in values if "1 rank," in case or case.startswith(others)
    )
    for case in (*others, ONE, TWO_RAILS):
        at = f"{case} @ {place}"
        gathers = 3 + values[at, "units gathered in backward"]
        # Torch's own reduce-scatter is an all-reduce here.
        reduces = 6 if case == FSDP2 else 3
        sent = values[at, "MiB sent"]
        # Headers of gloo and TCP, and acknowledgements.
        assert SHARE * (gathers + reduces) < sent < 1.03 * SHARE * (gathers + reduces)
        assert values[at, "of lower bound"] > 0
    for ours, theirs in ((TWO_RAILS, FSDP2), (TWO_RAILS, TUNED), (ONE, TUNED)):
        assert values[f"{ours} over {theirs} @ {place}", "x as fast"] > 0
    changes = {case for case, unit in values if unit == "x as fast, by one change"}
    assert changes == {f"pcomm in place of FSDP2 @ {place}"}
    assert values[f"computing / sending @ {place}", "where 1 hides all"] > 0
    alone = values[f"{ONE} over {UNSHARDED} @ 1 rank, linear", "x as fast as unsharded"]
    assert alone > 0
