"""`pcomm doctor` as a user runs it, with the two ranks that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from pcomm.core.testing.patience import PATIENCE_S, scaled_s

PROGRAM = "import sys; from pcomm.core.command.main import main; sys.exit(main(sys.argv[1:]))"


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
