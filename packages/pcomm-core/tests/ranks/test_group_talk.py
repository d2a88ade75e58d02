"""What ranks of a group tell each other by the store: lines, votes, and that one has failed."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from core_support.callers import together
from pcomm.core.control.agreement import FailureFlag, agree_in_group, vote
from pcomm.core.control.control import Control, Vote
from pcomm.core.errors import ConfigError, DivergenceError, PeerError, PeerTimeoutError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import default_group, ranks
from pcomm.core.topology import Topology

WAIT_S, SHORT_S = 120.0, 0.1


def mistake() -> ConfigError:
    return ConfigError("bytes", found="0", why="None.", fix="Use 1.")


@ranks(3)
def test_every_rank_gets_the_values_and_reasons_of_all(rank: int) -> None:
    with open_groups(Topology({"tp": 3}), ["tp"], timeout_s=WAIT_S) as groups:
        for turn in range(3):
            # The smallest is another rank's at each turn; texts are as hard as any.
            value = (rank + turn) % 3 - 1
            reason = f'rank {rank} "\n' if rank else ""
            got = vote(groups["tp"], "switch", value, reason, timeout_s=WAIT_S)
            values = tuple((r + turn) % 3 - 1 for r in range(3))
            assert got == Vote(-1, values, ("", 'rank 1 "\n', 'rank 2 "\n'))
        # The same topic, compared instead of collected, is another one.
        agree_in_group(groups["tp"], "switch", ["same"], timeout_s=WAIT_S)
        error = mistake() if rank == 1 else None
        with pytest.raises(ConfigError if rank == 1 else PeerError, match="bytes: 0"):
            vote(groups["tp"], "switch", rank, error=error, timeout_s=WAIT_S)
        assert vote(groups["tp"], "switch", rank, timeout_s=WAIT_S).values == (0, 1, 2)


def test_alone_there_is_nobody_to_ask() -> None:
    group = Group("tp", (5,), None)
    assert vote(group, "switch", 3, "it is there") == Vote(3, (3,), ("it is there",))
    with pytest.raises(ConfigError, match="bytes: 0"):
        vote(group, "switch", 3, error=mistake())
    store = dist.HashStore()
    assert Control(store, [5], 5).vote("switch", 1).values == (1,)
    assert store.num_keys() == 0


def test_missing_ranks_are_named_and_old_votes_are_not_heard() -> None:
    store = dist.HashStore()
    three = [Control(store, range(3), rank, timeout_s=WAIT_S) for rank in range(3)]

    def votes(rank: int) -> Vote:
        if rank == 0:
            return three[0].vote("switch", 7)
        # Its short time begins when the other one is there.
        place = f"{three[0].prefix}/vote/switch/at/0"
        while not store.check([place]):
            threading.Event().wait(0.001)
        return three[2].vote("switch", 7, timeout_s=SHORT_S)

    for problem in together(votes, (0, 2)).values():
        assert isinstance(problem, PeerTimeoutError)
        assert "switch: ranks [1] of 3 did not arrive within 0.1 s" in str(problem)
    found = together(lambda rank: three[rank].vote("switch", rank), range(3))
    assert set(found.values()) == {Vote(0, (0, 1, 2), ("", "", ""))}
    # A part of the ranks votes about the same topic by itself.
    pair = together(lambda rank: three[rank].among([1, 2]).vote("switch", 9 - rank), (1, 2))
    assert set(pair.values()) == {Vote(7, (8, 7), ("", ""))}


@pytest.mark.parametrize("size", [2, 3])
def test_votes_do_not_fill_the_store(size: int) -> None:
    store = dist.HashStore()
    all_ranks = [Control(store, range(size), rank, timeout_s=WAIT_S) for rank in range(size)]

    def round_of_everything() -> int:
        together(lambda rank: all_ranks[rank].vote("switch", rank, "r" * rank), range(size))
        together(lambda rank: all_ranks[rank].vote("switch", 0, error=mistake()), range(size))
        with pytest.raises(PeerTimeoutError):
            all_ranks[0].vote("switch", 0, timeout_s=0.02)
        together(lambda rank: all_ranks[rank].vote("switch", rank), range(size))
        return store.num_keys()

    first = round_of_everything()
    assert [round_of_everything() for _ in range(3)] == [first] * 3


@ranks(4)
def test_groups_with_the_same_topic_do_not_hear_each_other(rank: int) -> None:
    with open_groups(Topology({"tp": 2, "cp": 2}), ["tp", "cp"]) as groups:
        for _ in range(2):
            for name in ("tp", "cp"):
                # Equal within each group, different between the two groups of a kind.
                other = groups["cp" if name == "tp" else "tp"].rank
                agree_in_group(groups[name], "test", [f"{name} beside rank {other}"])


@ranks(4)
def test_a_difference_is_an_error_in_its_group_only(rank: int) -> None:
    with open_groups(Topology({"tp": 2, "cp": 2}), ["tp", "cp"]) as groups:
        lines = ["same", "one" if rank == 3 else "other"]
        if 3 in groups["cp"].ranks:
            with pytest.raises(DivergenceError, match=r"line 2: .*'other', rank 3 has 'one'"):
                agree_in_group(groups["cp"], "test", lines)
        else:
            agree_in_group(groups["cp"], "test", lines)


@ranks(2)
def test_an_error_reaches_every_rank(rank: int) -> None:
    group = Group.from_process_group("cp", default_group())
    error = mistake() if rank == 1 else None
    with pytest.raises(ConfigError if rank == 1 else PeerError, match="bytes: 0"):
        agree_in_group(group, "test", [], error=error)


@ranks(4)
def test_only_the_group_and_the_round_hear_it(rank: int) -> None:
    with open_groups(Topology({"dp": 2, "tp": 2}), ["dp", "tp"]) as groups:
        flag, other = FailureFlag(groups["tp"], "work"), FailureFlag(groups["tp"], "work")
        dist.barrier()
        if rank == 1:
            flag.sound("out of paper", round_number=3)
            flag.sound("and of ink", round_number=3)
        dist.barrier()
        assert flag.heard(round_number=3) == ("rank 1: out of paper" if rank < 2 else None)
        assert flag.heard(round_number=4) is None
        assert other.heard(round_number=3) is None


def test_alone_nobody_listens() -> None:
    flag = FailureFlag(Group("dp", (0,), None), "work")
    flag.sound("out of paper", round_number=0)
    assert flag.heard(round_number=0) is None
