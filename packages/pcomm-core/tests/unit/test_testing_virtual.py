"""Virtual ranks: collectives computed by hand, and errors that do not hang."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from pcomm.core.errors import LayoutError
from pcomm.core.testing import virtual
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.programs import wait_until
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual

SIZE = 3


def of(rank: int, *shape: int) -> Tensor:
    """Values that differ per rank and per element."""
    return torch.arange(torch.Size(shape).numel()).view(shape) + 100 * rank


def test_gathers_and_reductions_by_hand() -> None:
    def run(c: VirtualCollectives) -> list[Tensor]:
        x = of(c.rank, 3, 2)
        return [
            c.all_gather(x),
            c.all_gather(x, dim=1),
            c.reduce_scatter(x),
            c.all_reduce(x),
            c.all_reduce(x, op="max"),
            c.broadcast(x, source=1),
        ]

    inputs = [of(rank, 3, 2) for rank in range(SIZE)]
    total = inputs[0] + inputs[1] + inputs[2]
    for rank, found in enumerate(run_virtual(run, SIZE)):
        expected = [
            torch.cat(inputs),
            torch.cat(inputs, 1),
            total[rank : rank + 1],
            total,
            inputs[2],
            inputs[1],
        ]
        for result, wanted in zip(found, expected, strict=True):
            assert_equal(result, wanted)


def test_uneven_shards_by_hand() -> None:
    sizes = [2, 0, 3]
    # Row r: what rank r sends to each peer.
    sends = [[1, 0, 2], [0, 3, 1], [2, 1, 0]]

    def run(c: VirtualCollectives) -> tuple[Tensor, Tensor, Tensor]:
        gathered = c.all_gather(of(c.rank, sizes[c.rank], 2), sizes=sizes)
        shard = c.reduce_scatter(of(c.rank, 5, 2), sizes=sizes)
        sent, received = sends[c.rank], [sends[peer][c.rank] for peer in range(SIZE)]
        x = of(c.rank, sum(sent))
        return gathered, shard, c.all_to_all(x, send_sizes=sent, receive_sizes=received)

    total = sum(of(rank, 5, 2) for rank in range(SIZE))
    assert isinstance(total, Tensor)
    for rank, (gathered, shard, found) in enumerate(run_virtual(run, SIZE)):
        assert_equal(gathered, torch.cat([of(r, n, 2) for r, n in enumerate(sizes)]))
        assert_equal(shard, total.split(sizes)[rank])
        parts = [of(peer, sum(sends[peer])).split(sends[peer])[rank] for peer in range(SIZE)]
        assert_equal(found, torch.cat(parts))


def test_asynchronous_calls_and_out_give_the_same() -> None:
    def run(c: VirtualCollectives) -> None:
        x = of(c.rank, 6)
        for blocking, pending in (
            (c.all_gather, c.all_gather_async),
            (c.reduce_scatter, c.reduce_scatter_async),
            (c.all_reduce, c.all_reduce_async),
            (c.all_to_all, c.all_to_all_async),
            (c.broadcast, c.broadcast_async),
        ):
            result = blocking(x)
            assert_equal(pending(x).wait(), result)
            out = torch.empty_like(result)
            assert blocking(x, out=out) is out
            assert_equal(out, result)

    run_virtual(run, SIZE)


def test_results_do_not_share_memory_between_ranks() -> None:
    def run(c: VirtualCollectives) -> Tensor:
        x = torch.ones(3)
        result = c.broadcast(x)
        result += c.rank
        c.all_reduce(x)
        return result

    assert [r.tolist() for r in run_virtual(run, SIZE)] == [[1.0 + r] * 3 for r in range(SIZE)]


def test_a_fast_rank_waits_until_all_have_taken_its_piece() -> None:
    def run(c: VirtualCollectives) -> None:
        for step in range(300):
            gathered = c.all_gather(torch.tensor([step]))
            assert gathered.tolist() == [step] * SIZE

    run_virtual(run, SIZE)


def test_the_error_of_a_rank_releases_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody gets out of a wait because time is up.
    monkeypatch.setattr(virtual, "scaled_s", lambda _: threading.TIMEOUT_MAX)

    def run(c: VirtualCollectives) -> None:
        if c.rank == 1:
            raise ValueError("rank 1 is wrong")
        c.all_reduce(torch.ones(2))

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="rank 1 is wrong"):
        run_virtual(run, SIZE)
    assert set(threading.enumerate()) <= before


def test_of_several_errors_the_first_is_raised() -> None:

    def run(c: VirtualCollectives) -> None:
        if c.rank == 2:
            raise KeyError("first")
        wait_until(lambda: c._barrier.broken, "what follows the first error")
        raise ValueError(f"later, on rank {c.rank}")

    with pytest.raises(KeyError, match="first"):
        run_virtual(run, SIZE)


def test_parts_that_do_not_match_are_an_error() -> None:
    def run(c: VirtualCollectives) -> None:
        expected = [1, 1, 1]
        expected[(c.rank + 1) % SIZE] = 2
        c.all_to_all(torch.ones(3), send_sizes=[1, 1, 1], receive_sizes=expected)

    with pytest.raises(AssertionError, match=r"was sent \[1, 1, 1\], expected \["):
        run_virtual(run, SIZE)
    with pytest.raises(LayoutError, match="sends itself 1 and gets 2"):
        run_virtual(
            lambda c: c.all_to_all(torch.ones(3), send_sizes=[1] * 3, receive_sizes=[2] * 3), SIZE
        )
    with pytest.raises(LayoutError):
        run_virtual(lambda c: c.reduce_scatter(torch.ones(4)), SIZE)
