"""The measured parts of the benchmark between processes: what they do, and never how long."""

import csv

import pytest

from core_bench.rated_network import obstacle
from ntp_bench.copies import ALL, CASES, copies_of_rank, moved_over_fewest
from ntp_bench.kills import REPLICA_SETTINGS, SETTINGS
from ntp_bench.state_moves import MOVES
from pcomm.core.cli import main
from pcomm.core.testing import ranks


@pytest.mark.soak
def test_a_quick_run_writes_its_rows(tmp_path, capsys):
    table = tmp_path / "rows.csv"
    line = ["--quick", "--parts", "host,redistribute,recovery,replicas", "--csv", str(table)]
    assert main(["bench", "ntp", *line, "--debug"]) == 0
    lost = len(SETTINGS) + len(REPLICA_SETTINGS)
    assert capsys.readouterr().out.count("lost: ") == lost
    rows = rows_of(table)
    names = {"ntp host", "ntp recovery", "ntp lost replica", "ntp reshard"}
    assert {row["benchmark"] for row in rows} == names
    assert samples_lost(rows) == ["0.0"] * lost
    wrong = [row["value"] for row in rows if row["unit"] == "ranks with a wrong value"]
    assert wrong == ["0.0"] * len(MOVES)
    parts = {row["case"].split(" @ ")[0] for row in rows if row["unit"].startswith("ms of the")}
    assert parts == {"detect", "agree", "open groups", "build", "reshard", "step"}


@pytest.mark.soak
def test_a_lost_host_has_rows_of_its_own(tmp_path, capsys):
    if reason := obstacle():
        pytest.skip(f"no network namespaces here: {reason}")
    table = tmp_path / "rows.csv"
    before = "benchmark,case,value,unit\nntp recovery,kept,1.0,s\nntp lost host,replaced,1.0,s\n"
    table.write_text(before)
    # The second loss shows that the job is whole again after the first.
    line = ["--quick", "--kills", "2", "--parts", "hosts", "--csv", str(table)]
    assert main(["bench", "ntp", *line, "--debug"]) == 0
    rows = rows_of(table)
    assert samples_lost(rows) == ["0.0"]
    cases = {row["benchmark"]: row["case"] for row in rows}
    assert cases["ntp recovery"] == "kept"
    assert "replaced" not in {row["case"] for row in rows}


def rows_of(table):
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def samples_lost(rows):
    return [row["value"] for row in rows if row["unit"] == "samples of all kills"]


@ranks(4)
def test_what_a_rank_sends_with_owners(rank):
    width, replicas = 8, 4
    found = copies_of_rank(7, width)
    # Four blocks of two weights in fp32.
    whole = 4 * 4 * 8 * width**2
    part = whole // replicas
    for case, copies in CASES.items():
        own = found[case]
        sums, weights = 2 * (replicas - 1) * part, (replicas - 1) * part
        if copies is None:
            assert (case, own.times.sent_bytes, 4 * own.owned) == (ALL, sums, whole)
            continue
        assert own.times.sent_bytes == sums + weights
        assert 4 * own.owned == copies * part
        assert own.to_owners_bytes == (replicas - 1) * part + (copies - 1) * part + weights


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (4, 2), (4, 4), (8, 4), (3, 3)])
def test_what_moves_after_a_death_is_near_the_fewest(dp, tp):
    assert 1.0 <= moved_over_fewest(dp, tp) <= 1.05
