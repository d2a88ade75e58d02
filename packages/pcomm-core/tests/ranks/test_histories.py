"""Ranks with different pasts meet: one comes back, one skipped a call, one was left out.

Each history is told for all that has to agree: opening groups, and failure flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pcomm.core.control.agreement import FailureFlag
from pcomm.core.errors import PeerTimeoutError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

THREE = Topology({"dp": 3})
# Far beyond what a round takes, and for calls to which no other rank comes.
WAIT_S, SHORT_S = 60.0, 0.3


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    with mock.patch.dict("os.environ", {"PCOMM_TIMEOUT_S": str(seconds)}):
        yield


def all_have_come(word: str, size: int) -> None:
    """Wait for `size` ranks in the store, apart from what is tested."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"test/{word}", 1) == size:
        store.set(f"test/{word}/all", "")
    store.wait([f"test/{word}/all"])


def agree_on_everything(topology: Topology, rank: int, word: str) -> None:
    """Open the group, hear a flag of its last rank, and close."""
    size = topology.world_size - len(topology.failed)
    with open_groups(topology, ["dp"], timeout_s=WAIT_S) as groups:
        group = groups["dp"]
        flag, quiet = FailureFlag(group, "work"), FailureFlag(group, "work")
        if group.rank == group.size - 1:
            flag.sound(f"out of {word}", round_number=0)
        all_have_come(f"{word} sounded", size)
        assert flag.heard(round_number=0) == f"rank {group.ranks[-1]}: out of {word}"
        assert quiet.heard(round_number=0) is None
        assert float(group.collectives.all_reduce(torch.ones(1))) == group.size


@ranks(3)
def test_a_rank_that_was_away_comes_back(rank: int) -> None:
    agree_on_everything(THREE, rank, "paper")
    if rank != 2:
        for word in ("ink", "glue"):
            agree_on_everything(THREE.with_failed([2]), rank, word)
    for word in ("tape", "string"):
        agree_on_everything(THREE, rank, word)


@ranks(2)
def test_a_call_that_one_rank_skipped_does_not_keep_the_ranks_apart(rank: int) -> None:
    topology = Topology({"dp": 2})
    with open_groups(topology, ["dp"]) as groups:
        group = groups["dp"]
        for word in ("paper", "ink"):
            if rank == 0:
                with pytest.raises(PeerTimeoutError, match=r"ranks \[1\] of 2"):
                    open_groups(topology, ["dp"], timeout_s=SHORT_S)
                with time_limit(SHORT_S), suppress(PeerTimeoutError):
                    FailureFlag(group, "work")
            all_have_come(f"{word} skipped", 2)
            agree_on_everything(topology, rank, word)


@ranks(3)
def test_topologies_with_the_same_first_rank_do_not_disturb_each_other(rank: int) -> None:
    pair = THREE.with_failed([2])
    with ExitStack() as stack:
        everybody = stack.enter_context(open_groups(THREE, ["dp"], timeout_s=WAIT_S))
        for turn in range(2):
            if rank != 2:
                agree_on_everything(pair, rank, f"pair {turn}")
            with open_groups(THREE, ["dp"], timeout_s=WAIT_S) as groups:
                assert everybody["dp"].ranks == groups["dp"].ranks == (0, 1, 2)
                total = groups["dp"].collectives.all_reduce(torch.ones(1))
                assert float(total) == 3


@ranks(3)
def test_a_rank_that_was_left_out_and_still_calls_breaks_nothing(rank: int) -> None:
    alone = Group("dp", (0, 1, 2), None, rank=rank)
    for word in ("paper", "ink"):
        if rank == 2:
            with pytest.raises(PeerTimeoutError, match=r"ranks \[0, 1\] of 3 did not arrive"):
                open_groups(THREE, ["dp"], timeout_s=SHORT_S)
            with time_limit(SHORT_S), suppress(PeerTimeoutError):
                FailureFlag(alone, "work")
        all_have_come(f"{word} outside", 3)
        if rank != 2:
            agree_on_everything(THREE.with_failed([2]), rank, word)
