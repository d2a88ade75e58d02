"""Ranks that die and come back: what is told in the store, reports, stop signals, what is left.

The tasks stand in a program of the test, since a test module cannot be imported by its ranks.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import pytest

from pcomm.core.process.launch import RankError
from pcomm.core.process.resilient_ranks import ResilientRanks
from pcomm.core.testing.assertions import Living
from pcomm.core.testing.programs import Programs, is_running, scaled_s, wait_until

PROGRAM = """
import os, pickle, signal, sys, time
import torch, torch.distributed as dist
from pcomm.core.control.control import Control
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.process import resilient_ranks
from pcomm.core.process.launch import RankError
from pcomm.core.process.local_ranks import LocalRanks
from pcomm.core.process.resilient_ranks import ResilientRanks
from pcomm.core.topology import Topology
from core_support.generations import following, joined

SIZE, WAIT_S = 4, 3600.0
KEPT = []
PLACES = ["has not begun", "in first_place", "in second_place"]
# Every second generation is of all ranks and loses one of these; the next one goes on without it.
VICTIMS = {0: 3, 2: 0, 4: 1}


def generations(place):
    store, rank = place.store(timeout_s=WAIT_S), place.rank
    if place.incarnation:
        control = joined(store, rank, timeout_s=WAIT_S)
    else:
        control = Control(store, range(SIZE), rank, timeout_s=WAIT_S)
    sums = []
    while True:
        number = control.generation
        failed = sorted(set(range(SIZE)) - set(control.ranks))
        topology = Topology({"dp": SIZE}).with_failed(failed)
        groups = open_groups(topology, ["dp"], control=control)
        group = groups["dp"]
        sums.append(int(group.collectives.all_reduce(torch.tensor([10**rank]))))
        # Torch's functions know this process, although no default group connects it.
        assert dist.get_rank() == rank
        assert dist.get_process_group_ranks(group.process_group) == list(control.ranks)
        assert dist.get_rank(group.process_group) == group.rank
        store.add(f"in {number}", 1)
        members, victim = range(SIZE), VICTIMS.get(number)
        if rank == victim:
            signal.pause()
        if victim is None:
            groups.close()
        else:
            group.collectives.all_reduce_async(torch.ones(1))
            told = store.get(f"pcomm/ended/{1 + number // 2}").decode()
            assert told == f"{victim} 0 killed by SIGKILL", told
            groups.abandon()
            members = sorted(set(control.ranks) - {victim})
        assert not dist.is_initialized()
        if number == 6:
            return sums
        control = following(control, members)


def pauses(place):
    try:
        for pid in (os.getpid(), os.getppid()):
            open(os.path.join(os.environ["FOLDER"], f"pid-{pid}"), "w").close()
        # Not one long pause: a signal that arrives right before it would wait for its end.
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        return f"rank {place.rank} has stopped"


def in_two_places(place):
    first_place()
    second_place()


def first_place():
    wait_for("in first_place", "leave first_place")


def second_place():
    wait_for("in second_place", "leave second_place")


def wait_for(told, awaited):
    open(os.path.join(os.environ["FOLDER"], told), "w").close()
    while not os.path.exists(os.path.join(os.environ["FOLDER"], awaited)):
        time.sleep(0.01)


class AfterCtrlC:
    '''What a report is pickled by, in a process that gets a Ctrl-C once its task is over.'''

    dumps = staticmethod(pickle.dumps)

    @staticmethod
    def dump(report, pipe):
        os.kill(os.getpid(), signal.SIGINT)
        pickle.dump(report, pipe)


def gets_a_request_late(place):
    resilient_ranks.pickle = AfterCtrlC


class HalfOfIt:
    '''What a report is pickled by, in a process that stands still before the second half of it.'''

    dumps = staticmethod(pickle.dumps)

    @staticmethod
    def dump(report, pipe):
        text = pickle.dumps(report)
        pipe.write(text[: len(text) // 2])
        pipe.flush()
        os.kill(os.getpid(), signal.SIGSTOP)


def stands_still(place):
    if place.rank == 0:
        resilient_ranks.pickle = HalfOfIt
        # More than a pipe holds.
        return bytes(1 << 20)
    if place.rank == 1:
        signal.pause()


def main(job):
    if job == "server":
        ranks = LocalRanks(1)
        [server] = ranks.run(eval, ("__import__('os').getppid()",))
        os.kill(server, signal.SIGTERM)
        os.kill(server, signal.SIGINT)
        print(ranks.run(eval, ("7 * 6",)))
        # Nothing closes the ranks, and the program ends all the same.
        KEPT.append(ranks)
        return
    if job == "late":
        with ResilientRanks(1) as ranks:
            ranks.start(gets_a_request_late)
            print(ranks.wait()[0].reason)
        return
    if job == "stacks":
        begun = os.path.join(os.environ["FOLDER"], "stacks")
        open(begun, "w").close()
        with ResilientRanks(1) as ranks:
            ranks.start(in_two_places)
            for place, opened in (
                ("has not begun", "begin"),
                ("in first_place", "leave first_place"),
                ("in second_place", "leave second_place"),
            ):
                if place.startswith("in "):
                    while not os.path.exists(os.path.join(os.environ["FOLDER"], place)):
                        time.sleep(0.01)
                try:
                    ranks.wait(timeout_s=0.0)
                except RankError as problem:
                    told = str(problem)
                print([name for name in PLACES if name in told])
                open(os.path.join(os.environ["FOLDER"], opened), "w").close()
            print(ranks.wait()[0].reason)
        os.remove(begun)
        return
    if job == "half":
        with ResilientRanks(3) as ranks:
            ranks.start(stands_still)
            ranks.wait([2])
            ranks.kill(1)
            print(ranks.wait([1])[1].reason)
            # Also if all that is there has been read.
            ranks.kill(0)
            print(ranks.wait([0])[0].reason)
            ranks.join_again(0)
        print("closed")
        return
    with ResilientRanks(SIZE if job == "generations" else 2) as ranks:
        if job == "pauses":
            ranks.start(pauses)
            print([report.result for report in ranks.wait().values()])
            return
        store = ranks.place(0).store(timeout_s=WAIT_S)
        ranks.start(generations)
        for number, victim in VICTIMS.items():
            for generation, count in ((number, SIZE), (number + 1, SIZE - 1)):
                while store.add(f"in {generation}", 0) < count:
                    time.sleep(0.01)
                if generation == number:
                    ranks.kill(victim)
                    assert ranks.wait([victim])[victim].reason == "killed by SIGKILL"
            ranks.join_again(victim)
        for rank, report in ranks.wait().items():
            assert report.has_finished, report.traceback
            print(rank, report.incarnation, report.result)
        print(store.add("pcomm/ended/count", 0), store.get("pcomm/ended/7").decode()[4:])


if __name__ == "__main__":
    for job in sys.argv[1:]:
        print(f"job {job}", flush=True)
        main(job)
elif os.path.exists(os.path.join(os.environ["FOLDER"], "stacks")):
    # A rank that runs this file is not yet in its task.
    wait_for("imports", "begin")
"""


def written(folder: Path) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """What each job printed, of one process that has imported torch and has one server of ranks."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = ["generations", "half", "stacks", "late", "server"]
    with Programs() as programs:
        environment = {**os.environ, "FOLDER": str(folder)}
        done = programs.run(sys.executable, written(folder), *jobs, env=environment)
    found: dict[str, list[str]] = {job: [done.stderr] for job in jobs}
    for line in done.stdout.splitlines():
        if line.startswith("job "):
            lines = found[line.removeprefix("job ")] = []
        else:
            lines.append(line)
    assert done.returncode == 0, done.stderr
    return found


def test_killed_ranks_come_back_in_later_generations(printed: Mapping[str, list[str]]) -> None:
    # The sums show which ranks each generation was of.
    assert printed["generations"] == [
        "0 1 [1111, 1101, 1111]",
        "1 1 [1111]",
        "2 0 [1111, 111, 1111, 1110, 1111, 1101, 1111]",
        "3 1 [1111, 1110, 1111, 1101, 1111]",
        "7 finished",
    ]


def test_requests_to_stop_stacks_and_half_a_report(printed: Mapping[str, list[str]]) -> None:
    # The server outlives a request that a batch system sends to all processes.
    assert printed["server"] == ["[42]"]
    # A rank that stands still within its report keeps nobody.
    assert printed["half"] == ["killed by SIGKILL", "killed by SIGKILL", "closed"]
    # Stacks of ranks that go on are those of now.
    places = ["has not begun", "in first_place", "in second_place"]
    assert printed["stacks"] == [*(f"{[place]}" for place in places), "finished"]
    # A request after the task does not lose its report.
    assert printed["late"] == ["finished"]


@pytest.mark.parametrize("request_", ["kill", "Ctrl-C"])
def test_ranks_end_with_their_launcher(request_: str, programs: Programs, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    environment = {**os.environ, "FOLDER": str(folder)}
    launcher = programs.start(sys.executable, written(tmp_path), "pauses", env=environment)

    def are_in_their_task() -> bool:
        assert launcher.poll() is None, launcher.communicate()
        # Two ranks, and the server from which they were forked.
        return len(list(folder.iterdir())) == 3

    wait_until(are_in_their_task, "two ranks in their task")
    launcher.send_signal(signal.SIGKILL if request_ == "kill" else signal.SIGINT)
    printed, logged = launcher.communicate(timeout=scaled_s(60))
    stopped = [f"rank {rank} has stopped" for rank in range(2)]
    assert printed == ("job pauses\n" if request_ == "kill" else f"job pauses\n{stopped}\n"), logged
    pids = [int(path.name.removeprefix("pid-")) for path in folder.iterdir()]
    wait_until(lambda: not any(map(is_running, pids)), "the end of all ranks")


def test_nothing_is_left_of_several_launches() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def launch() -> None:
        with ResilientRanks(2, imports_main=False) as ranks:
            ranks.start(attrgetter("incarnation"))
            assert [report.result for report in ranks.wait().values()] == [0, 0]
            ranks.join_again(1)
            assert ranks.wait()[1].result == 1
            # What raises, and what is within a task when the ranks are closed.
            ranks.join_again(0, ["too many"])
            report = ranks.wait([0])[0]
            assert report.reason.startswith("failed: TypeError: ")
            assert isinstance(report.error, TypeError)
            assert "Traceback" in report.traceback
            ranks.join_again(0)
        ranks.close()

    launch()
    threads, before = Living.now().threads, files()
    for _ in range(3):
        launch()
    assert Living.now().threads == threads
    assert files() <= before


def test_calls_at_the_wrong_time_are_refused() -> None:
    with ResilientRanks(1, imports_main=False) as ranks:
        with pytest.raises(RankError, match=re.escape("wait([0]) first")):
            ranks.join_again(0)
        ranks.start(attrgetter("rank"))
        with pytest.raises(RankError, match="call join_again"):
            ranks.start(attrgetter("rank"))
        ranks.wait()
        # Its process has ended: nothing happens.
        ranks.kill(0)
    with pytest.raises(RankError, match="closed"):
        ranks.join_again(0)
