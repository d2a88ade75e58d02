"""Abandoned communicators are freed: their threads, files and tensors, whatever became of peers."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from pcomm.core.testing.programs import Programs

PROGRAM = """
import gc, os, signal, sys, weakref
from contextlib import suppress
import torch
from pcomm.core.control.control import Control
from pcomm.core.groups import communicators
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.process.resilient_ranks import ResilientRanks
from pcomm.core.testing.assertions import Living
from pcomm.core.testing.programs import wait_until
from pcomm.core.topology import Topology
from core_support.generations import following, joined

SIZE, NUM_GENERATIONS, WAIT_S = 3, int(os.environ["GENERATIONS"]), 3600.0
# From 256 KiB on, gathers and sums go through a queue with a thread of its own.
SMALL, LARGE = 4, 3 * 40 * 1024
# Rank 2 is killed in one generation, and stands still in the last one.
KILLED, STOPPED = 2, NUM_GENERATIONS - 1
# Collections leave out what was imported: they are repeated until all is gone.
gc.freeze()


def names_of_files():
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
    return sorted(found)


def start_operations(groups, names, lengths):
    '''Operations that need a rank which does not join them; references to their tensors.'''
    pending, tensors = [], []
    for name in names:
        for length in lengths:
            for operation in ("all_reduce", "all_gather", "reduce_scatter"):
                x = torch.ones(length * groups[name].size)
                tensors.append(weakref.ref(x))
                pending.append(getattr(groups[name].collectives, f"{operation}_async")(x))
    return pending, tensors


def task(place):
    store, rank = place.store(timeout_s=WAIT_S), place.rank
    # What torch and Python make once.
    torch.ones(LARGE).sum()
    before, files = Living.now(), names_of_files()
    if place.incarnation:
        control = joined(store, rank, timeout_s=WAIT_S)
    else:
        control = Control(store, range(SIZE), rank, timeout_s=WAIT_S)
    tensors, num_failed = [], 0
    while (number := control.generation) < NUM_GENERATIONS:
        topology = Topology({"dp": SIZE}).with_failed(sorted(set(range(SIZE)) - set(control.ranks)))
        # With options, gloo is another backend to torch.
        options = CommOptions(threads=1)
        specs = ["dp", GroupSpec.of_ranks((0, 1), "tail", options=options)]
        groups = open_groups(topology, specs, control=control)
        total = groups["dp"].collectives.all_reduce(torch.tensor([10**rank]))
        assert int(total) == sum(10**r for r in control.ranks)
        # The rank that fails joins no operation, and else one of the others.
        fails = number in (KILLED, STOPPED)
        names = [name for name in ("dp", "tail") if name in groups and not (fails and name != "dp")]
        absent = 2 if fails else number % 2
        if rank != absent:
            # Large messages by one rank alone, so that none is half way when it is left: gloo ends
            # a receive of which a part has come by the time limit of its group alone.
            lengths = [SMALL, LARGE] if rank == (absent + 1) % SIZE else [SMALL]
            pending, began = start_operations(groups, names, lengths)
            tensors += began
        else:
            pending = []
        assert not any(p.is_done() for p in pending)
        control.agree("test: in flight")
        if rank == 2 and fails:
            os.kill(os.getpid(), signal.SIGKILL if number == KILLED else signal.SIGSTOP)
        if number == KILLED:
            store.wait(["pcomm/ended/1"])
        groups.abandon()
        for p in pending:
            # At once, whatever keeps the peers.
            try:
                p.wait()
            except RuntimeError:
                num_failed += 1
        p = None
        del groups, pending
        control = following(control, range(2) if fails else range(SIZE))
    assert num_failed == len(tensors) > 0, (num_failed, len(tensors))

    def left():
        gc.collect()
        now = Living.now()
        return [
            *now.beyond(before),
            *(f"{n} tensors" for n in [sum(t() is not None for t in tensors)] if n),
            *(f"{n} communicators" for n in [len(communicators._communicators)] if n),
            *([] if names_of_files() == files else ["open files"]),
        ]

    wait_until(lambda: not left(), "the end of what was abandoned")
    return num_failed


def main():
    with ResilientRanks(SIZE) as ranks:
        store = ranks.place(0).store(timeout_s=WAIT_S)
        ranks.start(task)
        assert store.get("pcomm/ended/1") == b"2 0 killed by SIGKILL", ranks.wait(timeout_s=1)
        ranks.wait([2])
        # The process that comes back must not take the generation of the one before for its own.
        store.wait([f"pcomm/generation/{KILLED + 1}"])
        ranks.join_again(2)
        assert store.get("pcomm/ended/2").endswith(b" finished"), ranks.wait(timeout_s=1)
        reports = ranks.wait([0, 1])
        for rank, report in reports.items():
            print(rank, report.reason, report.result, report.traceback)
"""

IN_PART = """
import gc, os, signal, weakref
import torch
from pcomm.core.control.control import Control
from pcomm.core.errors import ClosedError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.process.resilient_ranks import ResilientRanks
from pcomm.core.testing.assertions import Living
from pcomm.core.testing.programs import wait_until
from pcomm.core.topology import Topology

# Gloo keeps what belongs to a message that had arrived in part until its time limit is over.
LENGTH, OPERATION_S, WAIT_S = 8 * 1024 * 1024, 10.0, 3600.0
# Collections leave out what was imported: they are repeated until all is gone.
gc.freeze()


def task(place):
    store, rank = place.store(timeout_s=WAIT_S), place.rank
    torch.ones(LENGTH).sum()
    before = Living.now()
    control = Control(store, range(2), rank, timeout_s=WAIT_S)
    dp = GroupSpec("dp", options=CommOptions(timeout_s=OPERATION_S))
    groups = open_groups(Topology({"dp": 2}), [dp], control=control)
    gathered = torch.full((2 * LENGTH,), -1.0)
    if rank == 0:
        store.set("pid", str(os.getpid()))
        groups["dp"].collectives.all_gather_async(torch.ones(LENGTH))
        signal.pause()
    victim = int(store.get("pid"))
    pending = groups["dp"].collectives.all_gather_async(torch.ones(LENGTH), out=gathered)
    wait_until(lambda: gathered[0] == 1, "the first numbers")
    os.kill(victim, signal.SIGSTOP)
    groups.abandon()
    arrived = gathered.clone()
    try:
        pending.wait()
    except ClosedError:
        print("raised", flush=True)
    # What had arrived before is there, and nothing is written any more.
    assert torch.equal(gathered, arrived)
    tensor = weakref.ref(gathered)
    del gathered, pending, groups

    def left():
        gc.collect()
        return [*Living.now().beyond(before), *(["the tensor"] if tensor() is not None else [])]

    wait_until(lambda: not left(), "the end of what was abandoned")
    print("freed", flush=True)
    os.kill(victim, signal.SIGKILL)


def main():
    with ResilientRanks(2) as ranks:
        ranks.start(task)
        report = ranks.wait([1])[1]
        print(report.reason, report.traceback)
"""


# The ranks of both come from one server, which imports torch once.
BOTH = """
import generations, in_part

if __name__ == "__main__":
    generations.main()
    in_part.main()
"""


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.soak)])
def test_abandoned_generations_and_messages_that_arrived_in_part_leave_nothing(
    count: int, tmp_path: Path, programs: Programs
) -> None:
    for name, text in (("generations", PROGRAM), ("in_part", IN_PART), ("both", BOTH)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    environment = {**os.environ, "GENERATIONS": str(count)}
    done = programs.run(sys.executable, tmp_path / "both.py", env=environment)
    told = done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["0", "finished"], ["1", "finished"]], told
    assert " ".join(lines[2:]).split()[:3] == ["raised", "freed", "finished"], told
