"""Opening groups: by a control, or when ranks do not ask for the same, or do not come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core_support.generations import following
from pcomm.core.control.agreement import FailureFlag, agree_in_group
from pcomm.core.control.control import Control
from pcomm.core.control.without_control import control_of_group, default_control
from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    FencedError,
    PcommError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
    UnsupportedError,
)
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.memory.pool_backends import FakePools
from pcomm.core.memory.pools import PoolRegistry
from pcomm.core.process.world import connect
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

LINE = Topology({"dp": 3, "tp": 1})
# Far beyond what any of these tests may take: whoever waits for it fails the test.
WAIT_S = 120.0


@contextmanager
def nothing_is_made() -> Iterator[None]:
    """Fails if the block makes a communicator or takes anywhere near the time limit."""
    before, begin = dict(dist.distributed_c10d._world.pg_map), time.monotonic()
    yield
    assert dist.distributed_c10d._world.pg_map == before
    assert time.monotonic() - begin < WAIT_S / 2


@pytest.mark.parametrize(
    ("odd", "specs", "words"),
    [
        (2, ["dp", "tp"], r"rank 0 has .*group tp,.*, rank 2 has .*group dp,"),
        (0, ["dp", "tp"], r"rank 0 has .*group dp,.*, rank [12] has .*group tp,"),
        (1, ["tp"], r"rank 0 has .*group dp,.*, rank 1 has '\(nothing\)'"),
        (1, ["tp", "dp", ("dp", "gather")], r"rank 0 has '\(nothing\)', rank 1 has .*'gather'"),
        (2, ["tp", ("dp", "gather")], r"rank 0 has .*role ''.*, rank 2 has .*role 'gather'"),
        (
            1,
            ["tp", GroupSpec("dp", options=CommOptions(timeout_s=7.0))],
            r"rank 0 has .*options \{\}.*, rank 1 has .*'timeout_s': 7\.0",
        ),
    ],
    ids=["another order", "rank 0", "fewer", "more", "another role", "other options"],
)
@ranks(3)
def test_another_list_on_one_rank_is_an_error_on_every_rank(
    rank: int, odd: int, specs: list[str | tuple[str, str] | GroupSpec], words: str
) -> None:
    with nothing_is_made(), pytest.raises(DivergenceError, match=words):
        open_groups(LINE, specs if rank == odd else ["tp", "dp"], timeout_s=WAIT_S)


@ranks(3)
def test_another_topology_or_backend_on_one_rank_is_an_error_on_every_rank(rank: int) -> None:
    reordered = Topology({"dp": 3, "tp": 1}, order=("dp", "tp"))
    with nothing_is_made(), pytest.raises(DivergenceError, match="line 1: rank 0 has 'topology"):
        open_groups(reordered if rank == 1 else LINE, ["dp"], timeout_s=WAIT_S)
    backend = "nccl" if rank == 2 else "gloo"
    with nothing_is_made(), pytest.raises(DivergenceError, match="'backend nccl'"):
        open_groups(LINE, ["dp"], backend=backend, timeout_s=WAIT_S)


@ranks(3)
def test_groups_open_after_a_divergence_was_repaired(rank: int) -> None:
    with pytest.raises(DivergenceError):
        open_groups(LINE, ["dp" if rank else "tp"], timeout_s=WAIT_S)
    with open_groups(LINE, ["dp"], timeout_s=WAIT_S) as opened:
        assert opened["dp"].size == 3


@ranks(3)
def test_a_rank_that_never_arrives_is_named(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        return
    with nothing_is_made(), pytest.raises(PeerTimeoutError) as caught:
        # Long enough for the rank that does come, on a busy machine.
        open_groups(LINE, ["dp"], timeout_s=2.0)
    assert "ranks [1] of 3 did not arrive within 2 s" in str(caught.value)


@ranks(3)
def test_missing_ranks_are_named_by_their_number_in_the_world(rank: int) -> None:
    if rank == 1:
        topology = Topology({"dp": 2}, offset=1)
        with pytest.raises(PeerTimeoutError, match=r"ranks \[2\] of 2 did not arrive"):
            open_groups(topology, ["dp"], timeout_s=0.3)


@ranks(3)
def test_the_time_limit_comes_from_the_environment(rank: int) -> None:
    if rank == 0:
        with (
            mock.patch.dict(os.environ, {"PCOMM_TIMEOUT_S": "0.25"}),
            pytest.raises(PeerTimeoutError, match=r"within 0\.25 s"),
        ):
            open_groups(LINE, ["dp"])


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 4}, {"dp": 3, "tp": 2}], ids=str)
@ranks(3)
def test_sizes_that_do_not_multiply_to_the_world_are_refused(
    rank: int, sizes: dict[str, int]
) -> None:
    with nothing_is_made(), pytest.raises(TopologyError) as caught:
        open_groups(Topology(sizes), ["dp"], timeout_s=WAIT_S)
    assert "torch.distributed has 3 ranks" in str(caught.value)
    assert "torchrun" in caught.value.fix


def test_more_ranks_than_processes_are_refused() -> None:
    with pytest.raises(TopologyError, match="not initialised, so there is one process"):
        open_groups(Topology({"dp": 2}), ["dp"])


@ranks(2)
def test_a_rank_outside_the_topology_is_refused_at_once(rank: int) -> None:
    if rank == 0:
        with nothing_is_made(), pytest.raises(TopologyError, match="this is rank 0 of 2"):
            open_groups(Topology({"dp": 1}, offset=1), ["dp"], timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["dpp"], "Did you mean 'dp'"),
        (["expert.ep"], r"view 'expert'"),
        (["dp", "dp"], "asked for twice"),
        ([("dp", "gather"), GroupSpec("dp", "gather", CommOptions(threads=1))], "asked for twice"),
        (["tp_dp"], "Ask for 'dp_tp'"),
        (["dp_dp"], "same axis twice"),
    ],
    ids=["no axis", "no view", "twice", "twice in a role", "two names", "axis twice"],
)
@ranks(3)
def test_a_list_that_cannot_be_opened_is_refused_on_every_rank(
    rank: int, specs: list[str | tuple[str, str] | GroupSpec], words: str
) -> None:
    with nothing_is_made(), pytest.raises(TopologyError, match=words):
        open_groups(LINE, specs, timeout_s=WAIT_S)


@ranks(3)
def test_a_mistake_on_one_rank_is_repeated_on_the_others(rank: int) -> None:
    """An unknown axis, another size, a bad variable: only rank 1 can see it, and all stop."""
    strict = GroupSpec("dp", options=CommOptions(max_ctas=4, strict=True))
    for topology, specs, variables, kind in (
        (LINE, ["tpp"], {}, TopologyError),
        (Topology({"dp": 2}), ["dp"], {}, TopologyError),
        (LINE, [strict], {}, UnsupportedError),
        (LINE, ["dp"], {"PCOMM_TIMEOUT": "5"}, ConfigError),
        (LINE, ["dp"], {"PCOMM_TIMEOUT_S": "soon"}, ConfigError),
    ):
        mine = (topology, specs, variables) if rank == 1 else (LINE, ["dp"], {})
        with (
            mock.patch.dict(os.environ, mine[2]),
            nothing_is_made(),
            pytest.raises(PcommError) as caught,
        ):
            open_groups(mine[0], mine[1], timeout_s=WAIT_S)
        assert type(caught.value) is (kind if rank == 1 else PeerError)
        if rank != 1:
            assert f"an error on rank 1: {kind.__name__}" in str(caught.value)


PAIR = Topology({"dp": 2})


def sum_of_ranks(group: Group) -> int:
    mine = torch.tensor([1 + group.ranks[group.rank]])
    return int(group.collectives.all_reduce(mine))


@ranks(4)
def test_the_first_ranks_of_a_job_open_groups_of_their_own(rank: int) -> None:
    first = rank < 2
    for turn in range(2):
        # The second half needs no control: its offset says who takes part. Either way is fine.
        topology = PAIR if first else Topology({"dp": 2}, offset=2)
        control = default_control(topology.ranks) if first or turn else None
        with open_groups(topology, ["dp"], timeout_s=WAIT_S, control=control) as groups:
            assert groups["dp"].ranks == ((0, 1) if first else (2, 3))
            assert groups.control is not None
            assert groups.control.ranks == groups["dp"].ranks
            assert sum_of_ranks(groups["dp"]) == (3 if first else 7)
            # Meanwhile both halves are also one job.
            with open_groups(Topology({"dp": 4}), ["dp"], timeout_s=WAIT_S) as whole:
                assert sum_of_ranks(whole["dp"]) == 10


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 8}, {"dp": 3}], ids=str)
@pytest.mark.parametrize("is_given", [False, True], ids=["default", "control"])
@ranks(4)
def test_a_wrong_size_is_an_error_on_every_rank(
    rank: int, sizes: dict[str, int], is_given: bool
) -> None:
    before = dict(dist.distributed_c10d._world.pg_map)
    with connect() as world:
        control = world.control if is_given else None
        words = "a control of ranks 0-3" if is_given else "torch.distributed has 4 ranks"
        with pytest.raises(TopologyError, match=words) as caught:
            open_groups(Topology(sizes), ["dp"], timeout_s=WAIT_S, control=control)
        assert "control" in caught.value.fix
        # The ranks are as good as before.
        with open_groups(Topology({"dp": 4}), ["dp"], timeout_s=WAIT_S, control=control) as groups:
            assert sum_of_ranks(groups["dp"]) == 10
    assert dist.distributed_c10d._world.pg_map == before


@ranks(2)
def test_a_wrong_size_on_one_rank_is_an_error_on_the_others(rank: int) -> None:
    control = default_control()
    mine = Topology({"dp": 3}) if rank == 1 else PAIR
    with pytest.raises(TopologyError if rank == 1 else PeerError, match="a control of ranks 0-1"):
        open_groups(mine, ["dp"], timeout_s=WAIT_S, control=control)


@ranks(2)
def test_a_control_of_other_numbers_than_those_of_torch_is_refused(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    swapped = Control(store, range(2), 1 - rank)
    words = f"rank {rank} of torch.distributed, and {1 - rank} of the control"
    with pytest.raises(TopologyError, match=words):
        open_groups(PAIR, ["dp"], timeout_s=WAIT_S, control=swapped)


@ranks(3)
def test_all_that_agrees_goes_on_in_the_generation_of_the_survivors(rank: int) -> None:
    everybody = Topology({"dp": 3})
    with open_groups(everybody, ["dp"], timeout_s=WAIT_S) as before:
        assert sum_of_ranks(before["dp"]) == 6
    control = default_control()
    agreed = control.agree("test: no rank uses the first generation any more")
    assert agreed
    if rank == 2:
        # It hears of the generation only in its calls, and disturbs nobody by them.
        store = dist.distributed_c10d._get_default_store()
        store.wait(["pcomm/generation/1"])
        for call in (
            lambda: open_groups(everybody, ["dp"], timeout_s=WAIT_S),
            lambda: open_groups(everybody, ["dp"], timeout_s=WAIT_S, control=control),
            lambda: agree_in_group(Group("dp", (0, 1, 2), None, rank=2), "test", []),
            lambda: FailureFlag(control, "work"),
            lambda: default_control((1, 2)).agree("test"),
        ):
            with pytest.raises(FencedError, match="of ranks 0-1, without rank 2"):
                call()
        with connect() as world, pytest.raises(FencedError):
            world.fail_together("test", None)
        return
    later = following(control, [0, 1])
    left = everybody.with_failed([2])
    with open_groups(left, ["dp"], timeout_s=WAIT_S, control=later) as groups:
        group = groups["dp"]
        assert groups.control is later
        assert sum_of_ranks(group) == 3
        agree_in_group(group, "test", ["same"], control=later)
        with pytest.raises(DivergenceError, match="rank 0 has '0', rank 1 has '1'"):
            agree_in_group(group, "test", [str(rank)], control=later)
        flag = FailureFlag(later, "work")
        if rank == 0:
            flag.sound("out of paper", round_number=1)
        later.agree("test: sounded")
        assert flag.heard(round_number=1) == "rank 0: out of paper"
        backend = FakePools()
        pools = PoolRegistry(groups, group, backend)
        arena = pools.arena("")
        with arena.allocating() as pool:
            pool.allocate(64)
        arena.freeze()
        pools.bind(arena, [group])
        pools.unbind(arena)
        agree_in_group(group, "test", ["same"])
        # By the default control it is the old generation that is asked, which is over.
        with pytest.raises(FencedError, match="of ranks 0-1"):
            agree_in_group(group, "test", ["same"], control=default_control([0, 1]))


@ranks(2)
def test_a_group_agrees_by_the_part_of_a_control(rank: int) -> None:
    group = Group("dp", (0, 1), None, rank=rank)
    assert control_of_group(group).ranks == (0, 1)
    assert control_of_group(group, default_control()).ranks == (0, 1)
    with pytest.raises(TopologyError, match="without 0" if rank else "without 1"):
        control_of_group(group, default_control([rank]))


def test_without_torch_distributed_there_is_no_default_control() -> None:
    group = Group("dp", (0, 1), None)
    for call in (default_control, lambda: agree_in_group(group, "test", [])):
        with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
            call()
    assert control_of_group(Group("dp", (3,), None)).ranks == (3,)


@ranks(2)
def test_groups_of_a_later_generation_agree_in_it_wherever_they_are_passed_on(rank: int) -> None:
    """Features take groups alone, so a group knows by which control its ranks agree."""
    later = following(default_control(), [0, 1])
    topology = Topology({"dp": 2, "tp": 1})
    with open_groups(topology, ["dp", "tp"], timeout_s=WAIT_S, control=later) as groups:
        derived = groups.with_collectives(lambda group: group.collectives)
        for opened in (groups, derived):
            agree_in_group(opened["dp"], "passed on", ["the same"], timeout_s=WAIT_S)
            agree_in_group(opened["tp"], "passed on", [f"of rank {rank}"], timeout_s=WAIT_S)
            assert control_of_group(opened["dp"]).generation == 1
            flag = FailureFlag(opened["dp"], "passed on")
            assert flag.heard(round_number=0) is None
        assert derived.control is groups.control
        # By the process group alone it is somebody else's, of no generation.
        process_group = groups["dp"].process_group
        assert process_group is not None
        with pytest.raises(FencedError):
            agree_in_group(Group.from_process_group("dp", process_group), "passed on", ["x"])
