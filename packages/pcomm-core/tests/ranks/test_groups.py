"""Groups that are open: who is in them, what they share, and how they are closed."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.errors import PeerError, TopologyError, UnsupportedError
from pcomm.core.groups import communicators, opening
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

SQUARE = Topology({"dp": 2, "tp": 2})


def num_communicators() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def sum_of_ranks(group: Group) -> int:
    """The sum over the group of 1 + global rank, by its communicator."""
    mine = torch.tensor([1 + group.ranks[group.rank]])
    return int(group.collectives.all_reduce(mine))


@ranks(4)
def test_each_rank_opens_its_own_groups_only(rank: int) -> None:
    before = num_communicators()
    with open_groups(SQUARE, ["tp", "dp"]) as opened:
        assert num_communicators() == before + 2
        tp, dp = opened["tp"], opened["dp"]
        assert tp.ranks == ((0, 1) if rank < 2 else (2, 3))
        assert dp.ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
        assert (tp.rank, dp.rank, tp.size, dp.size) == (rank % 2, rank // 2, 2, 2)
        assert sum_of_ranks(tp) == sum(r + 1 for r in tp.ranks)
        assert sum_of_ranks(dp) == sum(r + 1 for r in dp.ranks)
        assert repr(tp) == f"Group(tp, rank {rank % 2} of 2)"
    assert num_communicators() == before


@ranks(2)
def test_roles_own_different_communicators_over_the_same_ranks(rank: int) -> None:
    before = num_communicators()
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "gather"), ("dp", "reduce")]) as opened:
        assert num_communicators() == before + 3
        handles = [opened["dp"], opened["dp", "gather"], opened["dp", "reduce"]]
        assert len({id(handle.process_group) for handle in handles}) == 3
        assert {handle.ranks for handle in handles} == {(0, 1)}
        assert [handle.key for handle in handles] == ["dp", "dp[gather]", "dp[reduce]"]
        assert opened["dp", ""] is opened["dp"]
        # One communicator matches operations by their order, so it would add 1 and 10 here.
        addend = {"gather": 1.0, "reduce": 10.0}
        pending = {
            h.role: h.collectives.all_reduce_async(torch.tensor([addend[h.role]]))
            for h in (handles[1:] if rank == 0 else handles[:0:-1])
        }
        assert {role: float(work.wait()) for role, work in pending.items()} == {
            "gather": 2.0,
            "reduce": 20.0,
        }


@ranks(4)
def test_equal_groups_share_a_communicator(rank: int) -> None:
    topology = Topology({"dp": 4, "cp": 1})
    before = num_communicators()
    specs = ["dp", "dp_cp", ("dp_cp", "gather"), GroupSpec("dp", "gather")]
    # Other options mean another communicator.
    specs.append(GroupSpec("dp_cp", "other", CommOptions(timeout_s=30.0)))
    specs.append(GroupSpec("dp", "other"))
    with open_groups(topology, specs) as opened:
        assert opened["dp_cp", "other"].process_group is not opened["dp", "other"].process_group
        assert opened["dp"].process_group is not dist.group.WORLD
        assert opened["dp"].process_group is opened["dp_cp"].process_group
        assert opened["dp", "gather"].process_group is opened["dp_cp", "gather"].process_group
        assert opened["dp"].process_group is not opened["dp", "gather"].process_group
        assert num_communicators() == before + 4
        assert "that of dp " in opened.explain()
        assert sum_of_ranks(opened["dp_cp"]) == 10
    assert num_communicators() == before


@ranks(4)
def test_groups_of_views_are_found_under_their_prefix(rank: int) -> None:
    experts = SQUARE.view("expert", {"edp": 1, "ep": 4})
    with open_groups(experts, ["tp", "expert.ep", "expert.edp", ("expert.ep", "gather")]) as opened:
        assert opened["expert.ep"].ranks == (0, 1, 2, 3)
        assert opened["expert.edp"].is_identity
        assert sum_of_ranks(opened["expert.ep", "gather"]) == 10
        with pytest.raises(TopologyError, match=r"Did you mean 'expert\.ep'"):
            opened["exprt.ep"]


def test_one_rank_needs_no_torch_distributed() -> None:
    forbidden = mock.Mock(side_effect=AssertionError("torch.distributed was called"))
    topology = Topology({"dp": 1, "tp": 1}).view("expert", {"ep": 1})
    with (
        mock.patch.object(dist, "init_process_group", forbidden),
        mock.patch.object(dist, "new_group", forbidden),
        mock.patch.object(dist, "destroy_process_group", forbidden),
        mock.patch.object(opening, "new_communicator", forbidden),
        mock.patch.object(dist.distributed_c10d, "_get_default_store", forbidden),
        open_groups(topology, ["tp", "dp_tp", ("dp", "gather"), "expert.ep"]) as opened,
    ):
        assert not dist.is_initialized()
        for group in opened.values():
            assert group.is_identity
            assert (group.rank, group.size, group.ranks) == (0, 1, (0,))
            assert group.process_group is None
            assert isinstance(group.collectives, IdentityCollectives)
            assert group.differentiable is group.collectives
            x = torch.ones(3)
            assert group.collectives.all_gather(x) is x
        assert "none (identity)" in opened.explain()
    assert not dist.is_initialized()


@ranks(2)
def test_a_group_of_one_among_more_ranks_makes_no_communicator(rank: int) -> None:
    before = num_communicators()
    with open_groups(Topology({"dp": 2, "tp": 1}), ["tp"]) as opened:
        assert opened["tp"].ranks == (rank,)
        assert opened["tp"].is_identity
        assert num_communicators() == before


def test_a_missing_key_names_those_that_are_near() -> None:
    with open_groups(Topology({"dp": 1, "tp": 1}), ["tp", ("dp_tp", "gather")]) as opened:
        assert "tp" in opened
        assert ("dp_tp", "gather") in opened
        assert "dp_tp" not in opened
        for key, words in (
            ("tpp", "Did you mean 'tp'"),
            (("dp_tp", "gathr"), r"Did you mean 'dp_tp\[gather\]'"),
            ("dp_tp", r"'dp_tp\[gather\]'"),
            ("zzz", r"Known here: 'dp_tp\[gather\]', 'tp'"),
        ):
            with pytest.raises(TopologyError, match=words) as caught:
                opened[key]
            assert caught.value.asked == f"groups[{key!r}]"


@ranks(2)
def test_communicators_are_closed_last_opened_first(rank: int) -> None:
    with mock.patch.object(
        dist, "destroy_process_group", wraps=dist.destroy_process_group
    ) as destroyed:
        with open_groups(Topology({"dp": 2}), ["dp", ("dp", "a"), ("dp", "b")]) as opened:
            expected = [opened["dp", role].process_group for role in ("b", "a", "")]
        assert [call.args[0] for call in destroyed.call_args_list] == expected
        opened.close()
        assert destroyed.call_count == 3
    with pytest.raises(TopologyError, match=r"open groups \[\]"):
        opened["dp"]


@ranks(2)
def test_an_error_in_the_block_closes_and_passes_on(rank: int) -> None:
    before = num_communicators()
    topology = Topology({"dp": 2})
    with pytest.raises(ZeroDivisionError), open_groups(topology, ["dp", ("dp", "gather")]):
        raise ZeroDivisionError
    assert num_communicators() == before


@ranks(2)
def test_a_communicator_that_cannot_be_closed_does_not_keep_the_others_open(rank: int) -> None:
    before = num_communicators()
    opened = open_groups(Topology({"dp": 2}), ["dp", ("dp", "gather")])
    stuck = opened["dp", "gather"].process_group
    destroy = dist.destroy_process_group

    def fails_for_one(process_group: dist.ProcessGroup) -> None:
        destroy(process_group)
        if process_group is stuck:
            raise ValueError("stuck")

    with (
        mock.patch.object(dist, "destroy_process_group", fails_for_one),
        pytest.raises(ValueError, match="stuck"),
    ):
        opened.close()
    assert num_communicators() == before


@ranks(2)
def test_a_communicator_that_somebody_has_closed_needs_no_closing(rank: int) -> None:
    before = num_communicators()
    opened = open_groups(Topology({"dp": 2}), ["dp", ("dp", "gather")])
    dist.destroy_process_group(opened["dp", "gather"].process_group)
    opened.close()
    assert num_communicators() == before


@ranks(2)
def test_closing_after_the_end_of_torch_distributed_does_nothing(rank: int) -> None:
    opened, older = (open_groups(Topology({"dp": 2}), ["dp"]) for _ in range(2))
    store = PrefixStore("again", distributed_c10d._get_default_store())
    dist.destroy_process_group()
    opened.close()
    # Nor does it once it was begun again, when the communicators of before are unknown to it.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with open_groups(Topology({"dp": 2}), ["dp"]) as newer:
        older.close()
        assert sum_of_ranks(newer["dp"]) == 3
    dist.destroy_process_group()


@ranks(2)
def test_a_failure_half_way_closes_what_was_made(rank: int) -> None:
    before = num_communicators()
    made: list[dist.ProcessGroup] = []

    def only_one(*args: Any, **options: Any) -> dist.ProcessGroup:
        if made:
            raise RuntimeError("no more memory")
        made.append(communicators.new_communicator(*args, **options))
        return made[0]

    with (
        mock.patch.object(opening, "new_communicator", only_one),
        pytest.raises(RuntimeError, match="no more memory"),
    ):
        open_groups(Topology({"dp": 2}), ["dp", ("dp", "gather")])
    assert len(made) == 1
    assert num_communicators() == before


@ranks(4)
def test_a_rank_whose_own_communicators_are_fine_hears_of_the_failure_of_others(rank: int) -> None:
    before = num_communicators()
    fails = mock.Mock(side_effect=RuntimeError("no more memory"))
    with contextlib.ExitStack() as stack:
        if rank > 1:
            stack.enter_context(mock.patch.object(opening, "new_communicator", fails))
        with pytest.raises(PeerError if rank < 2 else RuntimeError, match="no more memory"):
            open_groups(SQUARE, ["tp"], timeout_s=20.0)
    assert num_communicators() == before


@ranks(4)
def test_groups_open_again_after_a_close(rank: int) -> None:
    # With torch's own names the second round finds the addresses of the first one.
    for _ in range(4):
        # A close right after opening disturbs nobody.
        open_groups(SQUARE, ["tp", "dp_tp"]).close()
        with (
            open_groups(SQUARE, ["tp", "dp_tp"]) as opened,
            open_groups(SQUARE, ["dp_tp"]) as other,
        ):
            assert opened["dp_tp"].process_group is not other["dp_tp"].process_group
            assert sum_of_ranks(opened["dp_tp"]) == sum_of_ranks(other["dp_tp"]) == 10
            assert sum_of_ranks(opened["tp"]) == (3 if rank < 2 else 7)


@ranks(3)
def test_ranks_with_different_numbers_of_communicators_find_each_other(rank: int) -> None:
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    with open_groups(Topology({"dp": 3}), ["dp"]) as opened:
        assert sum_of_ranks(opened["dp"]) == 6


@ranks(4)
def test_a_topology_with_an_offset_is_opened_by_its_ranks_alone(rank: int) -> None:
    # Rank 0 does not take part; rank 1 and the pair of 2 and 3 do not know of each other.
    if rank == 1:
        with open_groups(Topology({"tp": 1}, offset=1), ["tp"]) as opened:
            assert opened["tp"].ranks == (1,)
    elif rank > 1:
        with open_groups(Topology({"tp": 2}, offset=2), ["tp"]) as opened:
            assert opened["tp"].ranks == (2, 3)
            assert opened["tp"].rank == rank - 2
            assert sum_of_ranks(opened["tp"]) == 7


@ranks(4)
def test_overlapping_parts_of_a_job_do_not_mix_up_their_communicators(rank: int) -> None:
    for first in (1, 2):
        if rank < first:
            continue
        with open_groups(Topology({"tp": 4 - first}, offset=first), ["tp"]) as opened:
            assert sum_of_ranks(opened["tp"]) == sum(range(first + 1, 5))


@ranks(4)
def test_failed_ranks_are_left_out_and_not_waited_for(rank: int) -> None:
    topology = SQUARE.with_failed([3])
    if rank == 3:
        with pytest.raises(TopologyError, match="this is rank 3 of 4"):
            open_groups(topology, ["tp"])
        return
    with open_groups(topology, ["tp", "dp", "dp_tp"], timeout_s=20.0) as opened:
        assert opened["dp_tp"].ranks == (0, 1, 2)
        assert opened["tp"].ranks == ((0, 1) if rank < 2 else (2,))
        assert opened["dp"].ranks == ((1,) if rank == 1 else (0, 2))
        assert opened["tp"].is_identity == (rank == 2)
        assert sum_of_ranks(opened["dp_tp"]) == 6
        if rank != 1:
            assert sum_of_ranks(opened["dp"]) == 4


@ranks(2)
def test_communicators_of_others_are_wrapped_and_left_open(rank: int) -> None:
    both, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)]
    collection = {"dp": both, ("dp", "gather"): both, "tp": alone[rank]}
    before = num_communicators()
    with Groups.from_process_groups(collection) as wrapped:
        assert wrapped["dp"].process_group is both
        assert wrapped["dp", "gather"].key == "dp[gather]"
        assert wrapped["tp"].is_identity
        assert wrapped["tp"].ranks == (rank,)
        assert sum_of_ranks(wrapped["dp"]) == 3
    assert num_communicators() == before
    with pytest.raises(TopologyError, match="is no process group"):
        Group.from_process_group("tp", alone[1 - rank])
    with pytest.raises(TopologyError, match="None, which is no process group"):
        Group.from_process_group("tp", None)  # type: ignore[arg-type]


@ranks(2)
def test_a_copy_of_a_group_is_the_group_and_a_pickle_is_refused(rank: int) -> None:
    with open_groups(Topology({"dp": 2, "tp": 1}), ["dp", "tp"]) as opened:
        for group in (opened["dp"], opened["tp"]):
            assert copy.deepcopy({"group": group})["group"] is group
            assert copy.copy(group) is group
            with pytest.raises(UnsupportedError, match=f"rank {group.rank} of {group.size}"):
                pickle.dumps(group)
