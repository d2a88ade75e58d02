"""Local ranks: what they return, and what the reader sees when one fails, dies or hangs."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from pcomm.core.errors import ConfigError
from pcomm.core.process.local_ranks import LocalRanks, RankError, run_local
from pcomm.core.testing.on_ranks import RankPool
from pcomm.core.testing.programs import Programs, is_running, scaled_s, wait_until

# The tasks are `exec` and `eval`: a test module has no name under which another process could
# import functions from it.
RANK = "__import__('torch').distributed.get_rank()"
PID = "__import__('os').getpid()"


def program(source: str) -> tuple[str, dict[str, object]]:
    """Arguments of `exec` for `source`, with `rank` and what it needs imported."""
    head = "import contextlib, os, signal, time, torch\nimport torch.distributed as dist\n"
    return f"{head}rank = dist.get_rank()\n{textwrap.dedent(source)}", {}


def failure(ranks: LocalRanks, source: str, *, timeout_s: float | None = None) -> str:
    """What the caller reads when the ranks run `source`."""
    with pytest.raises(RankError) as caught:
        ranks.run(exec, program(source), timeout_s=timeout_s)
    return str(caught.value)


def test_results_come_in_rank_order() -> None:
    with LocalRanks(3) as ranks:
        # The last rank answers first.
        slow_first = f"__import__('time').sleep(0.1 * (2 - {RANK})) or {RANK}"
        assert ranks.run(eval, (slow_first,)) == [0, 1, 2]
        assert ranks.run(eval, (f"({RANK}, a)", {"a": 5})) == [(r, 5) for r in range(3)]
    assert run_local(eval, 2, ("__import__('torch').get_num_threads()",), threads=2) == [2, 2]
    assert not dist.is_initialized()


def test_every_task_has_a_world_of_its_own_in_the_same_processes() -> None:
    with LocalRanks(2) as ranks:
        first = ranks.run(eval, (PID,))
        adds = f"""
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        assert float(x) == 3.0, x
        assert dist.get_world_size() == 2
        assert torch.get_num_threads() == 1
        assert os.getpid() == {first}[rank]
        """
        for _ in range(3):
            ranks.run(exec, program(adds))


def test_tensors_come_back_by_value() -> None:
    with LocalRanks(2) as ranks:
        tensors = ranks.run(eval, (f"__import__('torch').full((3,), {RANK})",))
    # The ranks are gone, and what they returned is still there.
    assert [t.tolist() for t in tensors] == [[0, 0, 0], [1, 1, 1]]
    assert not any(t.is_shared() for t in tensors)


def test_the_message_starts_with_the_first_failure() -> None:
    """Rank 1 fails; rank 0 fails because of that, rank 2 is done, and neither comes first."""
    source = """
    def find_the_answer():
        raise ValueError("the answer is 41")

    if rank == 1:
        find_the_answer()
    elif rank == 0:
        dist.recv(torch.ones(1), src=1)
    """
    with LocalRanks(3) as ranks:
        text = failure(ranks, source)
    lines = text.splitlines()
    assert lines[0] == "rank 1 of 3 failed"
    assert lines[1] == "Traceback (most recent call last):"
    first, _, others = text.partition("rank 0: then ")
    assert "in find_the_answer" in first
    assert first.rstrip().endswith("ValueError: the answer is 41")
    assert "RuntimeError" in others
    assert "rank 2: finished" in others


def test_of_two_failures_the_earlier_one_is_shown_in_full() -> None:
    source = """
    if rank == 0:
        # Nothing comes until rank 1 has failed and closes its connections.
        with contextlib.suppress(RuntimeError):
            dist.recv(torch.ones(1), src=1)
    raise KeyError(f"key {rank}")
    """
    with LocalRanks(2) as ranks:
        text = failure(ranks, source)
    assert text.startswith("rank 1 of 2 failed\nTraceback")
    assert text.endswith("rank 0: then KeyError: 'key 0'")


def test_an_error_that_only_repeats_that_of_another_rank_is_not_the_cause() -> None:
    """Which of the two is the quicker one does not matter."""
    source = """
    from pcomm.core.errors import PeerError
    raise ValueError("the cause") if rank == 1 else PeerError("x", found="y", why="z", fix="w")
    """
    with LocalRanks(2) as ranks:
        text = failure(ranks, source)
    assert text.startswith("rank 1 of 2 failed\nTraceback")
    assert "ValueError: the cause" in text


def test_a_rank_that_waits_for_a_failed_one_shows_where() -> None:
    source = """
    def wait_for_a_message_that_never_comes():
        time.sleep(3600)

    if rank == 0:
        raise ValueError("no")
    wait_for_a_message_that_never_comes()
    """
    with LocalRanks(2) as ranks:
        text = failure(ranks, source)
    assert text.startswith("rank 0 of 2 failed\n")
    assert "rank 1: still running, stopped at\n" in text
    assert "in wait_for_a_message_that_never_comes" in text


def test_a_hang_shows_the_stack_of_every_rank() -> None:
    source = """
    def stuck_on_rank_0():
        dist.recv(torch.ones(1), src=1)

    def stuck_on_rank_1():
        while True:
            time.sleep(0.01)

    stuck_on_rank_0() if rank == 0 else stuck_on_rank_1()
    """
    with LocalRanks(2) as ranks:
        text = failure(ranks, source, timeout_s=scaled_s(1.0))
        assert not ranks.is_usable
    assert text.startswith("ranks [0, 1] of 2 did not finish in time\n")
    of_rank_0, of_rank_1 = text.split("rank 1: still running")
    assert "in stuck_on_rank_0" in of_rank_0
    # Python's stack also names torch's function that waits.
    assert "in recv" in of_rank_0
    assert "in stuck_on_rank_1" in of_rank_1


def test_a_rank_that_hangs_alone_is_the_one_named() -> None:
    with LocalRanks(3) as ranks:
        text = failure(ranks, "if rank == 2: time.sleep(3600)", timeout_s=scaled_s(1.0))
    assert text.startswith("ranks [2] of 3 did not finish in time\nrank 0: finished\n")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(7)", "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    ],
    ids=["exit", "SIGKILL"],
)
def test_a_rank_that_dies_is_named_with_its_end(end: str, words: str) -> None:
    source = f"""
    if rank == 1:
        {end}
    dist.recv(torch.ones(1), src=1)
    """
    with LocalRanks(2) as ranks:
        text = failure(ranks, source)
    # Rank 0 failed as well, and earlier than anybody could notice the death of rank 1.
    assert text.splitlines()[0] == f"rank 1 of 2 died: {words}"
    assert "rank 0: then RuntimeError" in text


def test_a_request_to_stop_that_ends_a_rank_is_no_failure_of_the_rank() -> None:
    """A batch system asks all processes, and a task may not listen for it yet."""
    source = f"""
    if rank == 1:
        signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        os.kill({os.getpid()}, signal.SIGINT)
    # Not one long sleep: a signal that arrives right before it would wait for its end.
    while True:
        time.sleep(0.05)
    """
    # Programs that a shell starts in the background ignore it, and so do these tests there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LocalRanks(2) as ranks, pytest.raises(KeyboardInterrupt) as caught:
            ranks.run(exec, program(source))
    finally:
        signal.signal(signal.SIGINT, before)
    assert "killed by SIGTERM" in str(caught.value.__cause__)


def test_a_second_request_leaves_the_report_of_the_first() -> None:
    source = """
    class Twice(KeyboardInterrupt):
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGINT)
            return KeyboardInterrupt, ("once",)
    raise Twice
    """
    with LocalRanks(1) as ranks, pytest.raises(RankError, match="rank 0 of 1 failed") as caught:
        ranks.run(exec, program(source))
    assert isinstance(caught.value.error, KeyboardInterrupt)


def test_a_rank_that_died_between_two_tasks_is_named() -> None:
    with LocalRanks(2) as ranks:
        pids = ranks.run(eval, (PID,))
        os.kill(pids[1], signal.SIGKILL)
        text = failure(ranks, "dist.barrier()")
    assert text.startswith("rank 1 of 2 died: killed by SIGKILL")


def test_ranks_cannot_be_used_after_a_failure() -> None:
    with LocalRanks(2) as ranks:
        pids = ranks.run(eval, (PID,))
        failure(ranks, "raise ValueError")
        assert not ranks.is_usable
        with pytest.raises(RankError, match="start new ones"):
            ranks.run(eval, ("1",))
        assert not any(is_running(pid) for pid in pids)


def test_ranks_that_are_dropped_end() -> None:
    ranks = LocalRanks(2)
    pids = ranks.run(eval, (PID,))
    del ranks
    assert not any(is_running(pid) for pid in pids)


def test_the_pool_throws_failed_ranks_away_and_goes_on() -> None:
    pool = RankPool()
    try:
        first = pool.run(eval, 2, PID)
        assert pool.run(eval, 2, PID) == first
        with pytest.raises(RankError, match="ValueError: broken"):
            pool.run(exec, 2, *program("raise ValueError('broken')"))
        again = pool.run(eval, 2, PID)
        assert not set(again) & set(first)
        assert pool.run(eval, 2, PID) == again
    finally:
        pool.close()
    assert not any(is_running(pid) for pid in again)


def test_the_pool_limits_the_time_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCOMM_RANKS_TIMEOUT_S", "0.5")
    pool = RankPool()
    try:
        with pytest.raises(RankError, match=r"ranks \[0\] of 2 did not finish in time"):
            pool.run(exec, 2, *program("if rank == 0: time.sleep(3600)"))
    finally:
        pool.close()


def test_an_error_of_pcomm_is_raised_as_it_is() -> None:
    source = """
    from pcomm.core.errors import ConfigError
    if rank == 1:
        raise ConfigError("train.steps", found="-1", why="Steps are counted.", fix="Use 1.")
    dist.barrier()
    """
    with pytest.raises(ConfigError) as caught:
        run_local(exec, 2, program(source))
    assert (caught.value.asked, caught.value.found) == ("train.steps", "-1")
    assert isinstance(caught.value.__cause__, RankError)
    assert str(caught.value.__cause__).startswith("rank 1 of 2 failed")
    # Another one comes with its traceback.
    with pytest.raises(RankError, match="ZeroDivisionError") as other:
        run_local(exec, 2, program("1 / 0"))
    assert isinstance(other.value.error, ZeroDivisionError)


@pytest.mark.parametrize(
    "source",
    [
        "class Odd(Exception): pass\nraise Odd('no pickle')",
        "raise ValueError('no pickle', lambda: 0)",
        "class Odd(Exception):\n    def __init__(self, a, b): super().__init__(a + b)\n"
        "raise Odd('no ', 'pickle')",
    ],
    ids=["unknown here", "not picklable", "not rebuildable"],
)
def test_an_error_that_cannot_travel_leaves_its_traceback(source: str) -> None:
    with pytest.raises(RankError, match="no pickle") as caught:
        run_local(exec, 1, program(source))
    assert caught.value.error is None


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RankError, match=r"rank [01] of 2 failed\n(.|\n)*lambda"):
        run_local(eval, 2, ("lambda: 0",))


def test_tasks_that_are_over_at_once_disturb_nobody() -> None:
    """A rank that is done would close connections that another one is still making."""
    with LocalRanks(4) as ranks:
        for step in range(15):
            assert ranks.run(eval, (str(step),)) == [step] * 4


@pytest.mark.parametrize("imports_main", [True, False])
def test_collections_leave_out_what_the_server_has_imported(imports_main: bool) -> None:
    """Not what a program's file has made: referrers of its objects can be found."""
    frozen = "__import__('gc').get_freeze_count()"
    with LocalRanks(2, imports_main=imports_main) as ranks:
        counts = ranks.run(eval, (frozen,))
    # All functions of torch, at least.
    assert [count > 50_000 for count in counts] == [not imports_main] * 2


def test_a_task_may_end_the_default_group_itself() -> None:
    world = "__import__('torch').distributed"
    end = f"({PID}, {world}.destroy_process_group(), {world}.is_initialized())"
    with LocalRanks(2) as ranks:
        first = ranks.run(eval, (end,))
        assert [is_there for _, _, is_there in first] == [False, False]
        # The next task has a world again, in the same processes, and may end it as well.
        assert ranks.run(eval, (f"({PID}, {RANK})",)) == [(first[r][0], r) for r in range(2)]
        assert ranks.run(eval, (end,)) == first


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path, programs: Programs) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import ctypes, os, sys, time
            import torch.distributed as dist
            from pcomm.core.process.local_ranks import run_local

            def busy(folder):
                # The server has imported them, and no rank does.
                assert {"colorsys", "pcomm.core.layout"} <= set(sys.modules)
                for pid in (os.getpid(), os.getppid()):
                    open(os.path.join(folder, f"pid-{pid}"), "w").close()
                if dist.get_rank() == 0:
                    time.sleep(600)
                # As in a tokenizer or a tensor operation that does not let other threads run.
                ctypes.PyDLL(None).sleep(600)

            if __name__ == "__main__":
                # Not in the ranks, which run this script again under another name.
                import pcomm.core.layout
                run_local(busy, 2, (os.environ["FOLDER"],), preload=["colorsys"])
            """
        )
    )
    folder = tmp_path / "pids"
    folder.mkdir()
    parent = programs.start(sys.executable, program, env={**os.environ, "FOLDER": str(folder)})

    def are_in_their_task() -> bool:
        assert parent.poll() is None, parent.communicate()
        # Two ranks, and the server from which they were forked.
        return len(list(folder.iterdir())) == 3

    wait_until(are_in_their_task, "two ranks in their task")
    parent.kill()
    parent.wait()
    pids = [int(path.name.removeprefix("pid-")) for path in folder.iterdir()]
    wait_until(lambda: not any(map(is_running, pids)), "the end of all ranks")
