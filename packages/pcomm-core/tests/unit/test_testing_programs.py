"""Programs of tests: all that they have started ends with them, whatever ends the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pcomm.core.testing import programs as patience
from pcomm.core.testing.programs import LONGEST_S, Programs, rank_limit_s, scaled_s, wait_until

PLAIN = [sys.executable, "-I", "-S", "-c"]
# Like the workers of torchrun: in a session of its own, and holding the pipes of its parent.
LAUNCHER = f"""
import subprocess
subprocess.Popen([*{PLAIN!r}, "import time; time.sleep(3600)"], start_new_session=True)
print("started", flush=True)
input()
"""


def launched(programs: Programs) -> subprocess.Popen[str]:
    launcher = programs.start(*PLAIN, LAUNCHER, stdin=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "started\n"
    wait_until(lambda: len(programs.running()) == 2, "the worker")
    return launcher


def test_stopping_ends_what_left_the_session() -> None:
    with Programs() as programs:
        launched(programs)
        programs.stop()
        assert programs.running() == []
        # It can be used again.
        assert programs.run(*PLAIN, "print(5)").stdout == "5\n"


def test_the_end_of_the_launcher_is_not_that_of_its_workers() -> None:
    """Otherwise the other tests would say nothing."""
    with Programs() as programs:
        launcher = launched(programs)
        launcher.kill()
        launcher.wait()
        assert len(programs.running()) == 1
    assert programs.running() == []


def test_a_program_that_takes_too_long_leaves_nothing() -> None:
    with Programs() as programs:
        with pytest.raises(subprocess.TimeoutExpired):
            programs.run(*PLAIN, LAUNCHER, stdin=subprocess.PIPE, within_s=1.0)
        assert programs.running() == []


def test_the_end_of_a_test_that_is_killed_is_theirs(tmp_path: Path) -> None:
    """Its own programs are not among those that this test would end."""
    program = tmp_path / "test_that_is_killed.py"
    program.write_text(
        "import os, signal\n"
        "from pcomm.core.testing.programs import Programs\n"
        "programs = Programs()\n"
        f"programs.start(*{PLAIN!r}, 'import time; time.sleep(3600)')\n"
        "print(*programs.running(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # Run without a mark of ours, which would count for what it starts, too.
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    [pid] = map(int, done.stdout.split())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of its program")


def test_what_it_prints_and_its_exit_code() -> None:
    with Programs() as programs:
        source = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
        done = programs.run(*PLAIN, source, env={})
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_program_hears_ctrl_c_also_where_the_tests_run_in_the_background() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Programs() as programs:
            program = programs.start(*PLAIN, "import time; print(1, flush=True); time.sleep(3600)")
            assert program.stdout is not None
            assert program.stdout.readline() == "1\n"
            program.send_signal(signal.SIGINT)
            program.communicate()
            assert program.returncode == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("waiting", "factor"), [(0.0, 1.0), (2.0, 1.0), (2.1, 1.05), (6.0, 3.0)], ids=str
)
def test_a_limit_grows_once_more_threads_wait_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, waiting: float, factor: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (waiting, 99.0, 99.0))
    assert scaled_s(10.0) == pytest.approx(10.0 * factor)
    monkeypatch.setenv("PCOMM_RANKS_TIMEOUT_S", "20")
    assert rank_limit_s() == pytest.approx(20.0 * factor)


def test_a_limit_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below that of pytest-timeout; but what somebody asks for, he gets."""
    monkeypatch.setattr(patience, "load_factor", lambda: 1000.0)
    assert scaled_s(1.0) == LONGEST_S
    assert scaled_s(LONGEST_S - 1) == LONGEST_S
    assert scaled_s(LONGEST_S + 1) == LONGEST_S + 1


def test_waiting_looks_until_it_is_true() -> None:
    looks = iter([False, 0, "yes"])
    wait_until(lambda: next(looks), "a yes")
    assert list(looks) == []


def test_waiting_gives_up_and_says_for_what() -> None:
    with pytest.raises(AssertionError, match=r"the moon: not within 0 s"):
        wait_until(lambda: False, "the moon", within_s=0.05)
