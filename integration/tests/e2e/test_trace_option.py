"""`pcomm train --trace`: one file with what all ranks did in a few steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def slices(path: Path) -> tuple[list[dict[str, Any]], dict[tuple[int, int], str]]:
    """The slices of a trace, and the names of its threads."""
    entries = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    return [e for e in entries if e["ph"] == "X"], names


def test_two_ranks_are_in_one_file(train, tmp_path):
    path = tmp_path / "traces" / "two.json"
    assert train(tmp_path / "run", "--ranks", "2", "--trace", str(path)) == 0
    events, names = slices(path)
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        count = Counter(e["name"] for e in mine)
        # Three steps, and in each as many collectives as without a trace.
        assert (count["step"], count["optimizer"]) == (3, 3)
        assert count["forward"] == count["backward"] >= 3
        sums = [e for e in mine if names[rank, e["tid"]].startswith("data.outer:reduce")]
        assert {e["name"] for e in sums} == {"all_reduce"}
        assert len(sums) == count["wait all_reduce"] >= 3
        assert all(e["args"]["stop is"] == "done" and e["args"]["bytes"] > 0 for e in sums)
        # A gradient is on its way only after backward has begun.
        first_backward = min(e["ts"] for e in mine if e["name"] == "backward")
        assert min(e["ts"] for e in sums) > first_backward
    # The loss is summed once a step over all ranks, at about the same time on both ranks.
    ends = [
        [e["ts"] + e["dur"] for e in events if e["pid"] == r and names[r, e["tid"]] == "dp_cp_tp"]
        for r in (0, 1)
    ]
    starts = [
        [e["ts"] for e in events if e["pid"] == r and names[r, e["tid"]] == "dp_cp_tp"]
        for r in (0, 1)
    ]
    assert len(ends[0]) == len(ends[1]) == 3
    for i in range(3):
        assert max(s[i] for s in starts) <= min(e[i] for e in ends)


def test_a_short_run_writes_what_there_was(train, tmp_path):
    path = tmp_path / "short.json"
    assert train(tmp_path / "run", "--set", "train.steps=2", "--trace", str(path)) == 0
    events, names = slices(path)
    assert Counter(e["name"] for e in events)["step"] == 1
    assert {e["pid"] for e in events} == {0}
    assert "compute" in names.values()


def test_a_folder_is_no_trace_file(train, tmp_path, capsys):
    assert train(tmp_path / "run", "--trace", str(tmp_path)) != 0
    assert "--trace" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
