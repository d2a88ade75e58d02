"""`pcomm doctor` as a user runs it, with the two ranks that it starts."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from pcomm.core.cli import main
from pcomm.core.doctor import command as self_test
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import Programs, free_port

PROGRAM = "import sys; from pcomm.core.cli import main; sys.exit(main(sys.argv[1:]))"


def of_job(rank: int, size: int, port: int, **more: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `pcomm doctor --json` as one rank of a launcher's job."""
    dist.destroy_process_group()
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        mock.patch.dict(os.environ, place | more),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as told,
    ):
        code = main(["doctor", "--json"])
    return code, out.getvalue(), told.getvalue()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken"])
@ranks(2)
def test_the_ranks_of_a_job_meet_and_all_say_whether_something_is_broken(
    rank: int, is_broken: bool, port: int, tmp_path: Path
) -> None:
    wrong = {"PCOMM_TIMOUT_S": "5"} if is_broken and rank == 1 else {}
    code, out, told = of_job(rank, 2, port, **wrong)
    codes = dist.FileStore(str(tmp_path / "codes"), 2)
    codes.set(str(rank), str(code))
    assert codes.get("0") == codes.get("1")
    if rank == 1:
        assert out == ""
        return
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert "self_test.all_reduce" not in findings
    own = [f for f in findings.values() if f["status"] == "broken" and "job." not in f["name"]]
    assert code == (1 if is_broken or own else 0), told
    assert findings["job.versions"]["value"] == "the same on all ranks"
    assert re.search(r"4 MiB on 2 ranks over gloo in \S+ ms", findings["job.all_reduce"]["value"])
    for other in range(2):
        assert socket.gethostname() in findings[f"job.rank.{other}"]["value"]
    assert ("variables" in findings["job.rank.1"]["reason"]) == is_broken


@ranks(2)
def test_a_rank_of_a_job_that_does_not_come_is_named(rank: int, port: int) -> None:
    code, out, told = of_job(rank, 3, port, PCOMM_TIMEOUT_S="5")
    assert code == 1
    if rank == 1:
        # It hears the same, or that rank 0 has ended with its report.
        assert out == ""
        assert re.search(r"ranks \[2\] of 3 did not arrive|rank 0 does not answer", told)
        return
    (missing,) = [f for f in json.loads(out)["findings"] if f["name"] == "job.ranks"]
    assert "ranks [2] of 3 did not arrive within 5 s" in missing["value"]


def test_versions_that_differ_are_named_with_their_ranks() -> None:
    told = {"host": "a", "interface": "eth0", "broken": [], "is_right": True, "time_s": 0.001}
    versions = [{"torch": "2.13"}, {"torch": "2.12", "triton": "3.6"}, {"torch": "2.13"}]
    found = {f.name: f for f in self_test._findings([{**told, "versions": v} for v in versions])}
    assert found["job.versions"].status == "broken"
    assert found["job.versions"].reason == (
        "torch: 2.13 on 0, 2; 2.12 on 1\ntriton: none on 0, 2; 3.6 on 1"
    )
    # 2 (3 - 1) / 3 times 4 MiB in 1 ms.
    assert found["job.all_reduce"].value.endswith("3 ranks over gloo in 1.0 ms, 5.59 GB/s")
    assert found["job.rank.2"].status == "ok"


def by_name(printed: str) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(printed)["findings"]}


def test_two_ranks_add_and_the_exit_code_says_whether_something_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["doctor", "--json"])
    findings = by_name(capsys.readouterr().out)
    assert findings["self_test.all_reduce"]["status"] == "ok", findings["self_test.all_reduce"]
    broken = [finding for finding in findings.values() if finding["status"] == "broken"]
    assert code == (1 if broken else 0), broken


def test_broken_items_end_with_1_and_say_what_is_wrong_and_how_to_mend_it(
    programs: Programs,
) -> None:
    wrong = {"GLOO_SOCKET_IFNAME": "nosuch0", "PCOMM_TIMOUT_S": "5"}
    done = programs.run(
        sys.executable, "-c", PROGRAM, "doctor", "--json", env={**os.environ, **wrong}
    )
    assert done.returncode == 1, done.stderr
    findings = by_name(done.stdout)
    ranks, variables = findings["self_test.all_reduce"], findings["variables"]
    assert ranks["status"] == variables["status"] == "broken"
    assert "nosuch0" in ranks["reason"]
    assert "Traceback" not in ranks["reason"]
    assert "GLOO_SOCKET_IFNAME" in ranks["fix"]
    assert "PCOMM_TIMOUT_S" in variables["value"]
