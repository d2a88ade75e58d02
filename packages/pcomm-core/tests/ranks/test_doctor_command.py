"""`pcomm doctor` as a user runs it, with the two ranks that it starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from pcomm.core.doctor import self_test
from pcomm.core.testing.free_port import free_port
from pcomm.core.testing.patience import PATIENCE_S, scaled_s
from pcomm.core.testing.programs import Programs

PROGRAM = "import sys; from pcomm.core.command.main import main; sys.exit(main(sys.argv[1:]))"


def of_job(
    programs: Programs, rank: int, size: int, port: int, **more: str
) -> subprocess.Popen[str]:
    """`pcomm doctor` as one rank of a job."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return programs.start(
        sys.executable, "-c", PROGRAM, "doctor", "--json", env={**os.environ, **place, **more}
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, told = process.communicate(timeout=scaled_s(PATIENCE_S))
    return process.returncode, out, told


@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken"])
def test_the_ranks_of_a_job_meet_and_all_say_whether_something_is_broken(
    programs: Programs, is_broken: bool
) -> None:
    port, wrong = free_port(), {"PCOMM_TIMOUT_S": "5"} if is_broken else {}
    started = [of_job(programs, 0, 2, port), of_job(programs, 1, 2, port, **wrong)]
    (code, out, told), (other_code, other_out, _) = map(ended, started)
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert other_out == ""
    assert "self_test.all_reduce" not in findings
    own = [f for f in findings.values() if f["status"] == "broken" and "job." not in f["name"]]
    assert code == other_code == (1 if is_broken or own else 0), told
    assert findings["job.versions"]["value"] == "the same on all ranks"
    assert re.search(r"4 MiB on 2 ranks over gloo in \S+ ms", findings["job.all_reduce"]["value"])
    for rank in range(2):
        assert socket.gethostname() in findings[f"job.rank.{rank}"]["value"]
    assert ("variables" in findings["job.rank.1"]["reason"]) == is_broken


def test_a_rank_of_a_job_that_does_not_come_is_named(programs: Programs) -> None:
    port = free_port()
    started = [of_job(programs, rank, 3, port, PCOMM_TIMEOUT_S="5") for rank in (0, 1)]
    (code, out, _), (other_code, other_out, told) = map(ended, started)
    assert (code, other_code, other_out) == (1, 1, "")
    (missing,) = [f for f in json.loads(out)["findings"] if f["name"] == "job.ranks"]
    assert "ranks [2] of 3 did not arrive within 5 s" in missing["value"]
    # It hears the same, or that rank 0 has ended with its report.
    assert re.search(r"ranks \[2\] of 3 did not arrive|rank 0 does not answer", told)


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


def doctor(**variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and findings by name, from a process of its own."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, "doctor", "--json"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=scaled_s(PATIENCE_S),
        check=False,
    )
    findings = json.loads(finished.stdout)["findings"]
    return finished.returncode, {finding["name"]: finding for finding in findings}


def test_two_ranks_add_and_the_exit_code_says_whether_something_is_broken() -> None:
    code, findings = doctor()
    assert findings["self_test.all_reduce"]["status"] == "ok", findings["self_test.all_reduce"]
    broken = [finding for finding in findings.values() if finding["status"] == "broken"]
    assert code == (1 if broken else 0), broken


def test_broken_items_end_with_1_and_say_what_is_wrong_and_how_to_mend_it() -> None:
    code, findings = doctor(GLOO_SOCKET_IFNAME="nosuch0", PCOMM_TIMOUT_S="5")
    assert code == 1
    ranks, variables = findings["self_test.all_reduce"], findings["variables"]
    assert ranks["status"] == variables["status"] == "broken"
    assert "nosuch0" in ranks["reason"]
    assert "Traceback" not in ranks["reason"]
    assert "GLOO_SOCKET_IFNAME" in ranks["fix"]
    assert "PCOMM_TIMOUT_S" in variables["value"]
