"""Ranks that issue different operations get an error that names them, and none hangs.

Every wait has a limit of its own far below the one of the test; a hang fails as a timeout.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, DivergenceError, PeerTimeoutError
from pcomm.core.groups.group import Group
from pcomm.core.groups.groups import open_groups
from pcomm.core.groups.options import CommOptions
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.testing.close import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.core.trace.ledgered import ledgered, ledgered_groups

# A communicator whose operation no other rank enters is freed when that has timed out.
SHORT = GroupSpec("dp", options=CommOptions(timeout_s=3))

X = torch.arange(6.0)


def everything(c: Collectives, rank: int) -> list[Tensor]:
    """Each operation with equal and with uneven sizes; nothing here diverges."""
    sizes = [1, 2, 3]
    return [
        c.all_gather(X + rank),
        c.all_gather(X[: sizes[rank]], sizes=sizes),
        c.reduce_scatter(X, sizes=sizes),
        c.reduce_scatter_async(X + rank).wait(),
        c.all_reduce(X + rank, op="max"),
        c.all_to_all(X + rank),
        c.all_to_all(
            torch.ones(3 * sizes[rank]), send_sizes=[sizes[rank]] * 3, receive_sizes=sizes
        ),
        c.broadcast(X + rank, source=2),
    ]


@pytest.mark.parametrize("every", [1, 3, 100])
@ranks(3)
def test_what_agrees_is_left_alone(rank: int, every: int) -> None:
    with open_groups(Topology({"dp": 3}), ["dp"]) as groups:
        plain = everything(groups["dp"].collectives, rank)
        watched = ledgered_groups(groups, every=every)
        for a, b in zip(everything(watched["dp"].collectives, rank), plain, strict=True):
            assert_equal(a, b)
        store = dist.distributed_c10d._get_default_store()
        before = store.num_keys()
        everything(watched["dp"].collectives, rank)
        groups["dp"].collectives.all_reduce(torch.zeros(1))
        # A long run does not fill the store.
        assert store.num_keys() <= before + 6


@ranks(2)
def test_a_ledger_that_has_closed_leaves_nothing_in_the_store(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        store, group = dist.distributed_c10d._get_default_store(), groups["dp"]
        counts = []
        for _ in range(3):
            watched = ledgered(group.collectives, group, every=2)
            for _ in range(3):
                watched.all_reduce(X)
            watched.close()  # type: ignore[attr-defined]
            # Both have left before one counts, and both have counted before the next one begins.
            # No agreement: it deletes keys of its last round after the other rank went on.
            group.collectives.all_reduce(X)
            counts.append(store.num_keys())
            group.collectives.all_reduce(X)
        assert counts[1] == counts[2]


def odd_one(c: Collectives, kind: str, is_odd: bool) -> None:
    """One operation that is different on the odd rank."""
    if kind == "operation" and is_odd:
        c.all_gather(X)
    elif kind == "source":
        c.broadcast(X, source=int(is_odd))
    elif kind == "reduction":
        c.all_reduce(X, op="max" if is_odd else "sum")
    else:
        c.all_reduce(
            X[: 5 if kind == "length" and is_odd else 6].to(
                torch.float64 if kind == "dtype" and is_odd else torch.float32
            )
        )


WORDS = {
    "operation": r"is all_gather float32 dim 0 \[6\], on rank 0 all_reduce sum float32 \[6\]",
    "source": r"is broadcast from 1 float32 \[6\], on rank 0 broadcast from 0",
    "reduction": r"is all_reduce max float32 \[6\], on rank 0 all_reduce sum",
    "length": r"is all_reduce sum float32 \[5\], on rank 0 all_reduce sum float32 \[6\]",
    "dtype": r"is all_reduce sum float64 \[6\], on rank 0 all_reduce sum float32 \[6\]",
}


@pytest.mark.parametrize("kind", WORDS)
@ranks(3)
def test_before_each_operation_the_odd_rank_is_found(rank: int, kind: str) -> None:
    with open_groups(Topology({"dp": 3}), ["dp"]) as groups:
        watched = ledgered_groups(groups, every=1, patience_s=0.2)["dp"].collectives
        watched.all_reduce(X)
        with pytest.raises(DivergenceError, match=f"operation 2 on rank 1 {WORDS[kind]}"):
            odd_one(watched, kind, rank == 1)
        # Nothing was sent, so the communicator is as good as before.
        assert_equal(groups["dp"].collectives.all_reduce(X), 3 * X)


@ranks(2)
def test_a_rank_stuck_where_the_other_never_comes_hears_that_it_has_closed(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), [SHORT]) as groups:
        watched = ledgered_groups(groups, every=8, patience_s=0.1)
        for _ in range(3):
            watched["dp"].collectives.all_reduce(X)
        words = r"operation 4 on rank 1 is \(nothing more: it has closed\), on rank 0 all_gather"
        step = watched["dp"].collectives.all_gather if rank == 0 else lambda _: watched.close()
        with pytest.raises(DivergenceError, match=words):
            step(X)


@ranks(2)
def test_a_wait_for_an_asynchronous_operation_finds_out_as_well(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), [SHORT]) as groups:
        watched = ledgered_groups(groups, every=8, patience_s=0.1)["dp"].collectives
        pending = watched.reduce_scatter_async(X) if rank == 0 else None
        step = watched.close if pending is None else pending.wait  # type: ignore[attr-defined]
        with pytest.raises(DivergenceError, match=r"operation 1 on rank 1 is .*closed"):
            step()


@ranks(2)
def test_ranks_stuck_in_different_groups_say_where_the_other_one_is(rank: int) -> None:
    # Freeing what earlier tests left stuck takes until its time limit; not while the ledger waits.
    gc.collect()
    options = CommOptions(timeout_s=6)
    specs = [GroupSpec("dp", role, options) for role in ("gather", "reduce")]
    with open_groups(Topology({"dp": 2}), specs) as groups:
        watched = ledgered_groups(groups, every=8, patience_s=0.1, timeout_s=2.0)
        mine, other = ("gather", "reduce") if rank == 0 else ("reduce", "gather")
        words = (
            rf"ranks \[{1 - rank}\] did not issue operation 1 within [0-9.]+ s; "
            rf"rank {1 - rank} stands at dp\[{other}\] operation 1: all_reduce"
        )
        with pytest.raises(PeerTimeoutError, match=words):
            watched["dp", mine].collectives.all_reduce(X)


@ranks(2)
def test_a_slow_rank_is_not_a_wrong_one(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), ["dp", ("dp", "control")]) as groups:
        watched = ledgered(groups["dp"].collectives, groups["dp"], every=8, patience_s=0.01)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            # It comes when the other has begun to look around.
            store.wait(["pcomm/0/ledger at/0"])
        assert_equal(watched.all_reduce(X), 2 * X)
        watched.close()  # type: ignore[attr-defined]


@ranks(2)
def test_a_rank_that_fails_elsewhere_does_not_leave_the_other_hanging(rank: int) -> None:
    def step() -> None:
        with open_groups(Topology({"dp": 2}), [SHORT]) as groups:
            watched = ledgered_groups(groups, every=8, patience_s=0.1)
            if rank == 1:
                raise ValueError("a mistake of the model")
            watched["dp"].collectives.all_reduce(X)

    if rank == 0:
        with pytest.raises(DivergenceError, match=r"on rank 1 is .*closed"):
            step()
    else:
        with pytest.raises(ValueError, match="a mistake of the model") as raised:
            step()
        assert "on rank 1 is (nothing more: it has closed)" in raised.value.__notes__[0]


def test_alone_there_is_nothing_to_compare() -> None:
    group = Group("dp", (0,), None)
    assert ledgered(group.collectives, group) is group.collectives
    with pytest.raises(ConfigError, match="every=0"):
        ledgered(group.collectives, group, every=0)
