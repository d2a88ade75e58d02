"""Groups of explicit ranks: who opens them, under which key, and what is refused on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import DivergenceError, PeerError, TopologyError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

# Far beyond what any of these tests may take: a rank that waits for it fails the test.
WAIT_S = 3600.0
LINE = Topology({"dp": 4})


def sum_of_ranks(group: Group, length: int = 1) -> set[int]:
    """The sum over the group of 10 to the power of its global ranks, by its communicator."""
    mine = torch.full((length,), 10 ** group.ranks[group.rank])
    return set(group.collectives.all_gather(mine).view(group.size, -1).sum(0).tolist())


def num_communicators() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@ranks(4)
def test_ranks_open_the_groups_that_they_belong_to_and_no_others(rank: int) -> None:
    before = num_communicators()
    sets = {"low": (0, 1, 2), "high": (1, 2, 3), "ends": (0, 3), "one": (2,), "all": (0, 1, 2, 3)}
    # In any order, as it comes out of a plan.
    specs = [GroupSpec.of_ranks(members[::-1], name) for name, members in sets.items()]
    specs[0] = GroupSpec("low", ranks=(2, 0, 1))
    mine = {name: members for name, members in sets.items() if rank in members}
    with open_groups(LINE, [*specs[:2], "dp", *specs[2:]], timeout_s=WAIT_S) as groups:
        assert {key for key in groups if isinstance(key, str)} == {*mine, "dp"}
        for name, members in mine.items():
            group = groups[name]
            assert (group.ranks, group.rank) == (members, members.index(rank))
            assert group.control is not None
            assert group.control.ranks == members
            # Below and above the size from which gathers go between pairs of ranks.
            for length in (1, 128 * 1024):
                assert sum_of_ranks(group, length) == {sum(10**r for r in members)}
        for name in set(sets) - set(mine):
            assert name not in groups
            with pytest.raises(TopologyError, match="explicit ranks the ones with this rank"):
                groups[name]
        # All ranks are those of dp, and one alone needs nothing.
        assert groups["all"].process_group is groups["dp"].process_group
        with_one = {name for name in mine if name not in ("one", "all")}
        assert num_communicators() == before + 1 + len(with_one)
        if rank == 2:
            assert groups["one"].is_identity
        # Several at once, in an order that differs between ranks.
        names = sorted(mine, reverse=bool(rank % 2))
        pending = {
            name: groups[name].collectives.all_reduce_async(torch.tensor([10**rank]))
            for name in names
        }
        for name, work in pending.items():
            assert work.wait().tolist() == [sum(10**r for r in mine[name])]
    assert num_communicators() == before


@ranks(3)
def test_roles_and_own_collectives_of_groups_of_ranks(rank: int) -> None:
    specs = [GroupSpec.of_ranks((0, 2), "pair"), GroupSpec.of_ranks((0, 2), "pair", "gather")]
    made: list[str] = []

    def make(group: Group) -> SpyCollectives:
        made.append(group.key)
        return SpyCollectives(group.collectives)

    topology = Topology({"dp": 3})
    with open_groups(topology, specs, timeout_s=WAIT_S, collectives=make) as groups:
        assert made == ([] if rank == 1 else ["pair", "pair[gather]"])
        if rank != 1:
            assert groups["pair"].process_group is not groups["pair", "gather"].process_group
            assert sum_of_ranks(groups["pair", "gather"]) == {101}


BAD: dict[str, tuple[list[GroupSpec | str], str]] = {
    "empty": ([GroupSpec.of_ranks((), "x")], "no ranks"),
    "twice": ([GroupSpec.of_ranks((0, 1, 0), "x")], "rank 0 more than once"),
    "unknown": ([GroupSpec.of_ranks((0, 7), "x")], "ranks 7, and .* by ranks 0-1"),
    "axes": ([GroupSpec.of_ranks((0, 1), "dp")], "a name of axes"),
    "unnamed": ([GroupSpec.of_ranks((0, 1), "")], "an empty name"),
    "same key": ([GroupSpec.of_ranks((0, 1), "x"), GroupSpec.of_ranks((0,), "x")], "twice"),
}


@pytest.mark.parametrize("case", BAD)
@ranks(2)
def test_what_cannot_be_opened_is_an_error_on_every_rank(rank: int, case: str) -> None:
    specs, words = BAD[case]
    # One rank has the mistake; the other one hears of it.
    mine = specs if rank == 0 else [GroupSpec.of_ranks((0, 1), "x")]
    with pytest.raises(TopologyError if rank == 0 else PeerError, match=words):
        open_groups(Topology({"dp": 2}), mine, timeout_s=WAIT_S)


@ranks(3)
def test_ranks_agree_on_groups_that_they_do_not_belong_to(rank: int) -> None:
    members = (0, 1) if rank == 2 else (0, 2)
    with pytest.raises(DivergenceError, match=r"group x of ranks 0,2.*rank 2 has .*ranks 0-1"):
        open_groups(Topology({"dp": 3}), [GroupSpec.of_ranks(members, "x")], timeout_s=WAIT_S)


@ranks(3)
def test_a_failed_rank_belongs_to_no_group(rank: int) -> None:
    if rank == 1:
        return
    topology = Topology({"dp": 3}, failed=[1])
    with open_groups(topology, [GroupSpec.of_ranks((0, 2), "left")], timeout_s=WAIT_S) as groups:
        assert sum_of_ranks(groups["left"]) == {101}
    with pytest.raises(TopologyError, match=r"ranks 1, and .* by ranks 0,2"):
        open_groups(topology, [GroupSpec.of_ranks((0, 1), "x")], timeout_s=WAIT_S)


@ranks(3)
def test_relabelled_groups_have_other_names_and_numbers_and_the_same_communicators(
    rank: int,
) -> None:
    before = num_communicators()
    pairs = {"low": (0, 1), "high": (1, 2)}
    specs = [GroupSpec.of_ranks(members, name) for name, members in pairs.items()]
    specs.append(GroupSpec.of_ranks((0, 1, 2), "all", "gather"))
    groups = open_groups(Topology({"dp": 3}), specs, timeout_s=WAIT_S)
    own, other = ("high", "low") if rank == 2 else ("low", "high")
    named = groups.relabelled({own: "pair", "all": "every"})
    kept = {other} if rank == 1 else set()
    assert {key for key in named if isinstance(key, str)} == {"pair", *kept}
    assert named["every", "gather"].name == "every"
    assert (named["pair"].ranks, named["pair"].rank) == (groups[own].ranks, groups[own].rank)
    assert named["pair"].collectives is groups[own].collectives
    assert named["pair"].differentiable is groups[own].differentiable
    assert (named.control, named.topology) == (groups.control, groups.topology)
    assert groups[own].name == own

    numbered = named.relabelled({}, {0: 0, 1: 5, 2: 7})
    assert numbered["pair"].ranks == {"low": (0, 5), "high": (5, 7)}[own]
    assert numbered["pair"].rank == groups[own].rank
    assert sum_of_ranks(numbered["every", "gather"]) == {1 + 10**5 + 10**7}
    # The control of the groups knows the ranks by their numbers of before.
    assert numbered.control is None
    agree_in_group(numbered["every", "gather"], "test", ["same"], timeout_s=WAIT_S)

    called: list[str] = []
    numbered["pair"].before_close(lambda: called.append("closes"))
    named.close()
    assert called == ["closes"]
    for one in (groups, numbered):
        one.close()
    for handle in (groups, numbered):
        assert len(handle) == 0
    assert num_communicators() == before


@ranks(2)
def test_of_relabelled_groups_with_one_key_the_last_one_has_it(rank: int) -> None:
    specs = [GroupSpec.of_ranks((0, 1), "first"), GroupSpec.of_ranks((rank,), f"alone{rank}")]
    specs.append(GroupSpec.of_ranks((1 - rank,), f"alone{1 - rank}"))
    specs.sort(key=lambda spec: spec.axes)
    with open_groups(Topology({"dp": 2}), specs, timeout_s=WAIT_S) as groups:
        named = groups.relabelled({f"alone{rank}": "first"})
        assert list(named) == [("first", ""), "first"]
        assert named["first"].size == 2
