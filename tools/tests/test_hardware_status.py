"""The page of hardware is what the tool makes of results; where there are none it says so."""

import json

from first_gpu_hour import STAGES
from hardware_status import NEVER, PAGE, commands_of, gpu_test_files, page
from repository import ROOT


def test_page_is_what_the_tool_writes():
    assert PAGE.read_text() == page(), "run `python tools/hardware_status.py`"


def test_every_file_of_gpu_tests_is_run_by_a_command_of_the_list():
    marked = {
        path
        for place in ("packages", "integration")
        for path in (ROOT / place).rglob("tests/gpu/test_*.py")
    }
    assert set(gpu_test_files()) == marked
    assert [path.name for path in marked if not list(commands_of(path))] == []


def test_rows_are_filled_by_the_newest_run_and_by_no_run_without_a_gpu(tmp_path):
    facts = {"status": "ok", "date": "2027-01-03", "seconds": 9.0}
    skip = "SKIPPED [6] packages/pcomm-core/tests/gpu/test_nccl.py:20: needs two GPUs"
    seen = [
        {"name": "versions", **facts, "rows": [{"names": ["NVIDIA H100"], "torch": "2.13.0"}]},
        {"name": "layers", **facts, "date": "2027-01-02", "status": "ended with 1"},
        {"name": "layers", **facts},
        # As it is written without a GPU.
        {"name": "layers", "status": "needs a GPU", "date": "2027-01-04"},
        {"name": "tests of core", **facts, "last": [skip, "== 9 passed, 6 skipped in 2.10s =="]},
    ]
    (tmp_path / "h100.jsonl").write_text("\n".join(map(json.dumps, seen)))
    table = [line.split(" | ") for line in page(tmp_path).splitlines() if line.startswith("| ")]
    ran = {cells[0].strip("| `"): cells[-1].removesuffix(" |") for cells in table}
    there = "2027-01-03, 1 x NVIDIA H100, torch 2.13.0"
    assert ran["layers"] == f"ok, {there}"
    assert ran["decode"] == NEVER
    assert ran["tests of core"] == f"ok: 9 passed, 6 skipped in 2.10s, {there}"
    tests = "packages/pcomm-core/tests/gpu"
    assert ran[f"{tests}/test_nccl.py"] == f"skipped, {there}"
    assert ran[f"{tests}/test_pools_on_nccl.py"] == ran["tests of core"]
    assert ran[f"{tests}/test_nccl_one_rank.py"] == NEVER
    assert {one.name for stage in STAGES for one in stage.commands if one.needs_gpu} <= set(ran)
