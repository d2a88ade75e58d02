"""Opening groups when ranks do not ask for the same, or do not come: everybody is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    PcommError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
    UnsupportedError,
)
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
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
