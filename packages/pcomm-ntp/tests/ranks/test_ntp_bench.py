"""The measured parts of the benchmark between processes: what they do, and never how long."""

import csv

from ntp_bench.kills import SETTINGS
from ntp_bench.state_moves import MOVES
from pcomm.core.cli import main


def test_a_quick_run_writes_its_rows(tmp_path, capsys):
    table = tmp_path / "rows.csv"
    line = ["--quick", "--parts", "host,redistribute,recovery", "--csv", str(table)]
    assert main(["bench", "ntp", *line, "--debug"]) == 0
    assert capsys.readouterr().out.count("a rank was killed") == len(SETTINGS)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["benchmark"] for row in rows} == {"ntp host", "ntp recovery", "ntp reshard"}
    lost = [row["value"] for row in rows if row["unit"] == "samples of all kills"]
    assert lost == ["0.0"] * len(SETTINGS)
    wrong = [row["value"] for row in rows if row["unit"] == "ranks with a wrong value"]
    assert wrong == ["0.0"] * len(MOVES)
    parts = {row["case"].split(" @ ")[0] for row in rows if row["unit"].startswith("ms of the")}
    assert parts == {"detect", "agree", "open groups", "build", "reshard", "step"}
