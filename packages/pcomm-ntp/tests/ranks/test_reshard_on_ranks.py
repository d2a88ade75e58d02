"""State that goes from plan to plan between processes, by gloo; and checkpoints of a plan."""

from __future__ import annotations

import threading
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor

from ntp_support.logical_state import LogicalState, state_units, unset
from pcomm.core import Groups, Topology, open_groups
from pcomm.core.checkpoint import ShardLoadPlanner, ShardSavePlanner
from pcomm.core.control import default_control
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.testing import assert_equal, ranks
from pcomm.ntp import Coord, Failures, NtpPlan, Units, plan
from pcomm.ntp.redistribute import redistribute, shard_views

WAIT_S = 3600.0
TOPOLOGY = Topology({"dp": 2, "tp": 2})
SMALL = state_units(3)
# Shards of hundreds of KiB, above every size at which core sends otherwise, in several rounds.
LARGE = state_units(9, width=24)


def plans(units: dict[str, Units]) -> tuple[NtpPlan, NtpPlan]:
    """All four ranks, and all but rank 3."""
    return (
        plan(TOPOLOGY, Failures(), units),
        plan(TOPOLOGY, Failures.at(Coord(dp=1, tp=1)), units),
    )


def opened(*specs: GroupSpec) -> Groups:
    return open_groups(TOPOLOGY, specs, control=default_control(range(4)), timeout_s=WAIT_S)


def assert_moved(whole, old, new, group, source, round_bytes):
    rank = group.ranks[group.rank]
    arguments = whole.arguments(old, new, group, rank, {0, 1, 2}) | {"source": source}
    found = redistribute(**arguments, round_bytes=round_bytes)
    for name, x in whole.shards(new, rank).items():
        assert_equal(arguments["target"][name], x)
    assert found.bytes_received == found.bytes_least
    return arguments["target"], found


@ranks(4)
def test_it_shrinks_and_grows_at_a_real_size(rank: int) -> None:
    whole = LogicalState.random(LARGE, hidden=96)
    full, less = plans(LARGE)
    left, everyone = GroupSpec.of_ranks((0, 1, 2), "left"), GroupSpec.of_ranks(range(4), "all")
    with opened(left, everyone) as groups:
        state: dict[str, Tensor] = {}
        if rank != 3:
            state = whole.shards(full, rank)
            state, found = assert_moved(whole, full, less, groups["left"], state, 1 << 20)
            assert found.rounds > 2
            assert (found.bytes_received > 1 << 20) == (rank == 2)
        _, found = assert_moved(whole, less, full, groups["all"], state, 1 << 20)
        assert (found.bytes_received > 1 << 20) == (rank == 3)
        assert (found.bytes_sent > 1 << 20) == (rank == 2)


@ranks(4)
def test_two_at_once_on_two_groups(rank: int) -> None:
    specs = [GroupSpec.of_ranks(range(4), "all", role) for role in ("one", "other")]
    errors: list[BaseException] = []
    with opened(*specs) as groups:

        def run(role: str, seed: int) -> None:
            try:
                whole = LogicalState.random(SMALL, hidden=seed, seed=seed)
                full, less = plans(SMALL)
                source = whole.shards(less, rank) if rank != 3 else {}
                for _ in range(3):
                    assert_moved(whole, less, full, groups["all", role], source, 100)
            except BaseException as problem:  # seen on the test's own thread below
                errors.append(problem)

        threads = [threading.Thread(target=run, args=a) for a in (("one", 3), ("other", 5))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


@ranks(4)
def test_a_checkpoint_of_a_damaged_job(rank: int, tmp_path: Path) -> None:
    whole = LogicalState.random(SMALL)
    full, less = plans(SMALL)
    # Rank 3 is a process without state, as an idle one is.
    saved = {}
    if rank != 3:
        saved = shard_views(less, rank, whole.shards(less, rank), whole.layouts(less, rank))
    dcp.save(dict(saved), checkpoint_id=tmp_path, planner=ShardSavePlanner())
    filled = unset(whole.shards(full, rank))
    views = shard_views(full, rank, filled, whole.layouts(full, rank))
    dcp.load(dict(views), checkpoint_id=tmp_path, planner=ShardLoadPlanner())
    for name, x in whole.shards(full, rank).items():
        assert_equal(filled[name], x)
