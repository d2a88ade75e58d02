"""Groups that are left behind because a rank is gone, and the groups of the next generation.

The ranks are forked by a program of the test, so that some may be killed. None of them looks at a
clock: who fails does so once the others have an operation in flight that needs it.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pcomm.core.errors import ClosedError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.testing.assertions import Living
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import Programs
from pcomm.core.topology import Topology

PROGRAM = """
import gc, os, signal, sys
import torch, torch.distributed as dist
from pcomm.core.collectives.protocol import Pending
from pcomm.core.control.control import Control
from pcomm.core.control.agreement import FailureFlag
from pcomm.core.errors import ClosedError, PeerError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.testing.assertions import Living, left_behind
from pcomm.core.topology import Topology
from core_support.generations import following

SIZE, LARGE, WAIT_S = 5, 128 * 1024, 3600.0
# How the rank that all others wait for fails in each generation: rank 4, then 3, then 2.
JOBS = [["killed"] * 3, ["killed", "stands still", "stands still"]]


def run(rank, path, fails):
    store = dist.FileStore(path, -1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    store = dist.distributed_c10d._get_default_store()
    control, topology = Control(store, range(SIZE), rank), Topology({"dp": SIZE})
    alive = [*range(SIZE)]
    before, log = Living.now(), []
    for turn, (victim, how) in enumerate([*zip((4, 3, 2), fails), (None, "")]):
        # Gloo keeps what belongs to a message that had arrived in part until this is over.
        options = CommOptions(timeout_s=30.0)
        specs = [GroupSpec("dp", options=options)]
        if len(alive) > 2:
            specs.append(GroupSpec.of_ranks(alive[1:], "tail", options=options))
        groups = open_groups(topology, specs, control=control, timeout_s=WAIT_S)
        flag = FailureFlag(control, "work")
        total = groups["dp"].collectives.all_reduce(torch.tensor([10**rank]))
        assert total.tolist() == [sum(10**r for r in alive)], total
        # Large operations, too, while those of the old generation end.
        large = groups["dp"].collectives.all_gather_async(torch.full((LARGE,), float(rank)))
        assert large.wait().view(len(alive), -1)[:, 0].tolist() == alive
        if victim is None:
            groups.close()
            break
        if rank == victim:
            # All others have begun what they cannot end without this rank.
            store.wait([f"{turn} began {r}" for r in alive if r != rank])
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            flag.sound("stands still", round_number=turn)
            signal.pause()
        handles = [groups[name] for name in ("dp", "tail") if name in groups]
        pending = []
        for handle in handles:
            c = handle.collectives
            pending.append(c.all_reduce_async(torch.ones(4)))
            pending.append(c.reduce_scatter_async(torch.ones(LARGE * c.size)))
        pending.append(groups["dp"].differentiable.all_reduce_async(torch.ones(4)))
        store.set(f"{turn} began {rank}", "")
        for p in pending:
            try:
                p.wait_or(lambda: flag.heard(round_number=turn))
            except PeerError as problem:
                log.append("heard")
                assert how == "killed" or f"rank {victim}: stands still" in str(problem)
            except RuntimeError:
                # Its peer was killed, or another rank has abandoned the groups.
                if how == "killed":
                    flag.sound("lost a peer", round_number=turn)
                log.append("lost")
            else:
                raise AssertionError("ended without a rank")
        called = []
        groups.before_close(lambda: called.append("waits for others"))
        groups.before_close(lambda: called.append("local"), is_local=True)
        groups.abandon()
        groups.abandon()
        groups.close()
        assert called == ["local"], called
        for p in pending:
            # Each is left, also towards a rank that stands still.
            try:
                p.wait()
            except RuntimeError:
                continue
            raise AssertionError("ended without a rank")
        for handle in handles:
            for length in (4, LARGE):
                for call in (handle.collectives.all_gather, handle.differentiable.all_gather):
                    try:
                        call(torch.ones(length))
                    except ClosedError:
                        continue
                    raise AssertionError("an abandoned communicator was used")
        alive.remove(victim)
        control = following(control, alive)
        topology = topology.with_failed([victim])
        del groups, handles, pending, p
    left = left_behind(before, within_s=180.0)
    assert not left, left
    dist.destroy_process_group()
    print(f"rank {rank}: ended, {'heard' in log}", flush=True)


# Collections leave out what was imported: they are repeated until all is gone.
gc.freeze()
for number, fails in enumerate(JOBS):
    children = {}
    for rank in range(SIZE):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            run(rank, f"{sys.argv[1]} {number}", fails)
            # Through the end of the interpreter, which must not wait for what was left behind.
            sys.exit(0)
        children[pid] = rank
    codes = {}
    while set(codes) != set(range(SIZE)):
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if 0 in codes and 1 in codes or any(code not in (0, -9) for code in codes.values()):
            # What stands still, or waits for a rank that failed by mistake.
            for left in children:
                os.kill(left, signal.SIGKILL)
    print("codes", *(codes[rank] for rank in range(SIZE)))
"""


def test_survivors_of_three_failures_leave_and_go_on(programs: Programs, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = programs.run(sys.executable, program, tmp_path / "store")
    told = done.stdout + done.stderr
    codes = [line for line in done.stdout.splitlines() if line.startswith("codes")]
    assert codes == ["codes 0 0 -9 -9 -9"] * 2, told
    for rank in range(2):
        # Some lose their peer before they hear that it was killed; all hear of one that is there.
        assert done.stdout.count(f"rank {rank}: ended") == 2, told
        assert f"rank {rank}: ended, True" in done.stdout, told


@ranks(2)
def test_idle_groups_and_those_with_others_collectives_are_abandoned(rank: int) -> None:
    before, log = Living.now(), list[str]()
    groups = open_groups(Topology({"dp": 2, "tp": 1}), ["dp", "tp", ("dp", "gather")])
    other = groups.with_collectives(lambda group: group.collectives)
    handles: list[Group] = [groups["dp"], other["dp", "gather"]]
    handles[0].collectives.all_gather_async(torch.ones(128 * 1024)).wait()

    def fail() -> None:
        log.append("fails")
        raise ValueError("a mistake")

    handles[1].before_close(lambda: log.append("first"), is_local=True)
    take_back = other.before_close(lambda: log.append("taken back"), is_local=True)
    groups["tp"].before_close(fail, is_local=True)
    take_back()
    if rank == 0:
        # The other rank is in no hurry.
        with pytest.raises(ValueError, match="a mistake"):
            other.abandon()
        assert log == ["fails", "first"]
    dist.barrier()
    if rank == 1:
        with pytest.raises(ValueError, match="a mistake"), groups:
            groups.abandon()
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.collectives.all_reduce(torch.ones(1))
    assert Living.now().process_groups == before.process_groups
    # An idle queue has no thread any more.
    names = {thread.name for thread in Living.now().threads - before.threads}
    assert names <= {"pcomm freeing"}
    with open_groups(Topology({"dp": 2}), ["dp"]) as again:
        assert again["dp"].collectives.all_reduce(torch.ones(1)).tolist() == [2.0]


def test_groups_of_others_and_of_one_rank_have_nothing_to_abandon() -> None:
    alone = open_groups(Topology({"dp": 1}), ["dp"])
    handle = alone["dp"]
    alone.abandon()
    assert len(alone) == 0
    assert handle.collectives.all_reduce(torch.ones(1)).tolist() == [1.0]
    Groups.from_process_groups({}).abandon()
