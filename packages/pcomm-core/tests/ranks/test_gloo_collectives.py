"""Large gathers and reduce-scatters of gloo groups, which go between pairs of ranks."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.gloo import GlooCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.core.groups.communicators import new_collectives
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, ranks, run_twin
from pcomm.core.topology import Topology

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
# More than the 256 KiB from which on pairs are used, and no multiple of a piece of 128 KiB.
LARGE_BYTES = 300_000
PAIR = Topology({"dp": 2})


def counted() -> Collectives:
    """Those of the default group, whose operations between pairs are counted."""
    collectives = default_collectives()
    pairs = cast(Any, collectives)._pairs
    pairs.channel = mock.Mock(wraps=pairs.channel)
    return collectives


def num_pairwise(collectives: Collectives) -> int:
    """Operations of `counted` collectives that went between pairs so far."""
    return cast(int, cast(Any, collectives)._pairs.channel.call_count)


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Whole numbers that differ per rank and element; three of them add up exactly in bf16."""
    flat = (torch.arange(torch.Size(shape).numel()) * 7 + rank * 5 + salt) % 23
    return (flat % 2 == 0 if dtype == torch.bool else flat.to(dtype)).view(shape)


def total_of(addends: Sequence[Tensor]) -> Tensor:
    """Their sum in their dtype, in which small integers wrap around and booleans stay such."""
    return torch.stack(list(addends)).sum(0, dtype=addends[0].dtype)


def strided_like(x: Tensor) -> Tensor:
    """Memory of the same shape with gaps."""
    return torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0]


def cases(dtype: torch.dtype) -> list[tuple[int, bool, list[int] | None, list[int]]]:
    """Dimension, whether async, `sizes` as given, and the lengths that they mean.

    More of them for a dtype that is added as it is, and for one that is added in fp32.
    """
    n = LARGE_BYTES // dtype.itemsize // 2 | 1
    if dtype not in (torch.float32, torch.bfloat16):
        return [(0, True, [0, n, n // 2], [0, n, n // 2]), (-1, False, None, [n] * 3)]
    found: list[tuple[int, bool, list[int] | None, list[int]]] = []
    for place, sizes in enumerate((None, [0, n, n // 2], [n, 5, 0], [1, 0, n])):
        is_async = place % 2 == 0
        lengths = [n] * 3 if sizes is None else sizes
        found += [(0, is_async, sizes, lengths), (-1, not is_async, sizes, lengths)]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(3)
def test_large_shards_are_gathered(rank: int, dtype: torch.dtype) -> None:
    collectives = counted()
    for num_done, (dim, is_async, sizes, lengths) in enumerate(cases(dtype)):
        shards = [
            numbers(r, *((n, 2) if dim == 0 else (2, n)), dtype=dtype)
            for r, n in enumerate(lengths)
        ]
        whole, mine = torch.cat(shards, dim), shards[rank].clone()
        in_place = torch.empty_like(whole)
        own = in_place.split(lengths, dim)[rank]
        own.copy_(mine)
        for x, out in (
            (mine, None),
            (mine, torch.empty_like(whole)),
            (mine, strided_like(whole)),
            (own, in_place),
        ):
            result = run_twin(collectives, "all_gather", is_async, x, dim=dim, sizes=sizes, out=out)
            assert out is None or result is out
            assert_equal(result, whole)
            assert_equal(mine, shards[rank])
        assert num_pairwise(collectives) == 4 * (num_done + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(3)
def test_large_tensors_are_added_and_scattered(rank: int, dtype: torch.dtype) -> None:
    collectives = counted()
    for num_done, (dim, is_async, sizes, lengths) in enumerate(cases(dtype)):
        n = sum(lengths)
        addends = [numbers(r, *((n, 2) if dim == 0 else (2, n)), dtype=dtype) for r in range(3)]
        shard = total_of(addends).split(lengths, dim)[rank].contiguous()
        mine, in_place = addends[rank].clone(), addends[rank].clone()
        for x, out in (
            (mine, None),
            (mine, torch.empty_like(shard)),
            (mine, strided_like(shard)),
            (in_place, in_place.split(lengths, dim)[rank]),
        ):
            result = run_twin(
                collectives, "reduce_scatter", is_async, x, dim=dim, sizes=sizes, out=out
            )
            assert out is None or result is out
            assert_equal(result, shard)
            assert_equal(mine, addends[rank])
        # In place, what belongs to others stays as it was.
        kept = [
            shard if r == rank else part for r, part in enumerate(addends[rank].split(lengths, dim))
        ]
        assert_equal(in_place, torch.cat(kept, dim))
        assert num_pairwise(collectives) == 4 * (num_done + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ranks(3)
def test_sums_of_short_formats_are_rounded_once(rank: int, dtype: torch.dtype) -> None:
    """large + 1 is large in these formats, and large + 2 is not."""
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    assert torch.tensor(large, dtype=dtype) + 1 == large
    for holder in range(3):
        x = torch.full((3 * LARGE_BYTES // 2,), large if rank == holder else 1.0, dtype=dtype)
        shard = default_collectives().reduce_scatter(x)
        assert_equal(shard, torch.full_like(shard, large + 2))


@ranks(2)
def test_what_is_large_is_so_by_the_bytes_of_the_largest_shard(rank: int) -> None:
    collectives = counted()
    limit = 256 * 1024 // 4
    for is_large, sizes in ((True, [limit, 0]), (False, [limit - 1] * 2), (True, [1, limit])):
        before = num_pairwise(collectives)
        shards = [numbers(r, n) for r, n in enumerate(sizes)]
        assert_equal(collectives.all_gather(shards[rank], sizes=sizes), torch.cat(shards))
        addends = [numbers(r, sum(sizes)) for r in range(2)]
        result = collectives.reduce_scatter(addends[rank], sizes=sizes)
        assert_equal(result, total_of(addends).split(sizes)[rank])
        assert num_pairwise(collectives) - before == (2 if is_large else 0)


def start_any(
    collectives: Collectives, chance: random.Random, rank: int, salt: int
) -> tuple[Callable[[], Tensor], Tensor]:
    """Start something with `chance`, the same on all ranks: what waits for it, and what it is."""
    kinds = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
    # Half of them are those that go between pairs if they are large.
    name = chance.choice(kinds + kinds[:2] + kinds[:1])
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64])
    length = 3 * chance.choice([1, 50, LARGE_BYTES // dtype.itemsize, 70_001])
    xs = [numbers(r, length, dtype=dtype, salt=salt) for r in range(3)]
    results = {
        "all_gather": lambda: torch.cat(xs),
        "reduce_scatter": lambda: total_of(xs).chunk(3)[rank],
        "all_reduce": lambda: total_of(xs),
        "all_to_all": lambda: torch.cat([x.chunk(3)[rank] for x in xs]),
        "broadcast": lambda: xs[0],
    }
    if chance.random() < 0.2:
        result = run_twin(collectives, name, False, xs[rank])
        return lambda: result, results[name]()
    return getattr(collectives, f"{name}_async")(xs[rank]).wait, results[name]()


@pytest.mark.parametrize("seed", range(2))
@ranks(3)
def test_many_operations_on_their_way_do_not_mix(rank: int, seed: int) -> None:
    collectives, chance = counted(), random.Random(seed)
    started = [start_any(collectives, chance, rank, salt) for salt in range(25)]
    assert 3 < num_pairwise(collectives) < 22
    # Each rank waits in an order of its own.
    random.Random(rank).shuffle(started)
    for wait, expected in started:
        assert_equal(wait(), expected)


@ranks(3)
def test_two_communicators_do_not_wait_for_each_other(rank: int) -> None:
    """Each rank starts them in another order, which only one communicator would mind."""
    n = LARGE_BYTES // 4
    specs = ["dp", GroupSpec("dp", "gather", CommOptions(threads=1))]
    with open_groups(Topology({"dp": 3}), specs) as opened:
        reduces, gathers = opened["dp"].collectives, opened["dp", "gather"].collectives
        shards = [[numbers(r, n, salt=s) for r in range(3)] for s in range(4)]
        addends = [[numbers(r, 3 * n, salt=s) for r in range(3)] for s in range(4)]
        starts = ["gather"] * 4 + ["reduce"] * 4
        random.Random(rank).shuffle(starts)
        gathered, reduced = [], []
        for kind in starts:
            if kind == "gather":
                x = shards[len(gathered)][rank]
                gathered.append((gathers.all_gather_async(x), len(gathered)))
            else:
                x = addends[len(reduced)][rank]
                reduced.append((reduces.reduce_scatter_async(x), len(reduced)))
        for pending, place in reversed(reduced):
            assert_equal(pending.wait(), total_of(addends[place]).chunk(3)[rank])
        for pending, place in gathered:
            assert_equal(pending.wait(), torch.cat(shards[place]))


# -- peers that do something else --------------------------------------------------------------


def until(word: str) -> None:
    """Wait for a rank to `say` it."""
    dist.distributed_c10d._get_default_store().wait([word])


def say(word: str) -> None:
    dist.distributed_c10d._get_default_store().set(word, "")


@pytest.mark.parametrize(
    ("name", "is_async"), [("all_gather", False), ("reduce_scatter", True)], ids=str
)
@ranks(2)
def test_a_peer_that_never_joins_is_an_error_within_the_time_of_the_group(
    rank: int, name: str, is_async: bool
) -> None:
    x = numbers(rank, LARGE_BYTES)
    with open_groups(PAIR, [GroupSpec("dp", options=CommOptions(timeout_s=2.0))]) as opened:
        collectives = opened["dp"].collectives
        # A second one, for which nobody asks any more.
        if rank == 0:
            if is_async:
                first = getattr(collectives, f"{name}_async")(x)
                collectives.all_gather_async(x)
                with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                    first.wait()
            else:
                with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                    run_twin(collectives, name, False, x)
            for later in ("all_gather", "reduce_scatter"):
                for how in (False, True):
                    # Not one more time-out each: it is not even begun.
                    with pytest.raises(RuntimeError, match="before this one failed"):
                        run_twin(collectives, later, how, x)
            with pytest.raises(RuntimeError):
                collectives.all_reduce(torch.ones(1))
            say("rank 0 has seen it")
        else:
            until("rank 0 has seen it")
    # And other groups are as good as before.
    assert float(default_collectives().all_reduce(torch.ones(1))) == 2.0


@ranks(2)
def test_a_rank_that_gathers_never_gets_what_the_other_wants_to_add(rank: int) -> None:
    n = 256 * 1024 // 4
    with open_groups(PAIR, [GroupSpec("dp", options=CommOptions(timeout_s=2.0))]) as opened:
        collectives = opened["dp"].collectives
        operation = collectives.reduce_scatter if rank else collectives.all_gather
        # The second one may hear that the first has given up.
        with pytest.raises(RuntimeError, match=r"(?i)timed out|clos|reset"):
            operation(numbers(rank, 2 * n if rank else n))


@pytest.mark.parametrize("is_async", [False, True])
@ranks(2)
def test_a_peer_that_closes_its_group_is_an_error_long_before_the_time_is_up(
    rank: int, is_async: bool
) -> None:
    x = numbers(rank, LARGE_BYTES)
    opened = open_groups(PAIR, [GroupSpec("dp", options=CommOptions(timeout_s=600.0))])
    try:
        # The queue has a thread, which must not keep the connections.
        run_twin(opened["dp"].collectives, "all_gather", is_async, x)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"(?i)clos|reset"):
                run_twin(opened["dp"].collectives, "reduce_scatter", is_async, x)
            say("rank 0 has seen it")
    finally:
        opened.close()
    if rank == 1:
        del opened
        gc.collect()
        until("rank 0 has seen it")


@ranks(2)
def test_a_group_closes_while_something_is_on_its_way(rank: int) -> None:
    with open_groups(PAIR, [GroupSpec("dp", options=CommOptions(timeout_s=600.0))]) as opened:
        if rank == 0:
            opened["dp"].collectives.all_gather_async(numbers(rank, LARGE_BYTES))
    assert float(default_collectives().all_reduce(torch.ones(1))) == 2.0


@ranks(2)
def test_what_is_in_flight_when_groups_close_ends_well_on_all_ranks(rank: int) -> None:
    """Two groups, and more chunks than are posted at first; rank 1 closes before it has sent."""
    n = 1_000_000
    opened = open_groups(PAIR, [GroupSpec("dp", role) for role in ("first", "second")])
    pending = []
    for turn in range(3):
        for group in opened.values():
            c, x = group.collectives, numbers(rank, 2 * n, salt=turn)
            pending.append((turn, c.reduce_scatter_async(x), c.all_gather_async(x[:n])))
    opened.close()
    for turn, added, gathered in pending:
        xs = [numbers(r, 2 * n, salt=turn) for r in range(2)]
        assert_equal(added.wait(), total_of(xs).chunk(2)[rank])
        assert_equal(gathered.wait(), torch.cat([x[:n] for x in xs]))


@ranks(2)
def test_gloo_gets_collectives_of_its_own_with_any_options(rank: int) -> None:
    specs = ["dp", GroupSpec("dp", "gather", CommOptions(threads=1, timeout_s=30.0))]
    with open_groups(PAIR, specs) as opened:
        for key in ("dp", ("dp", "gather")):
            assert type(opened[key].collectives) is GlooCollectives
        group = opened["dp"].process_group
        assert group is not None
        for backend in ("nccl", "cpu:gloo,cuda:nccl", "fake"):
            with mock.patch.object(dist, "get_backend", return_value=backend):
                assert type(new_collectives(group)) is DistributedCollectives


@ranks(2)
def test_what_torch_cannot_add_is_refused_at_every_size_and_breaks_nothing(rank: int) -> None:
    with open_groups(PAIR, ["dp"]) as opened:
        collectives = opened["dp"].collectives
        for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64):
            for length in (128, 1 << 21):
                with pytest.raises(UnsupportedError, match=f"reduce_scatter: (.|\n)*{dtype}"):
                    collectives.reduce_scatter_async(torch.ones(length).to(dtype))
        mine = torch.full((LARGE_BYTES,), float(rank))
        assert_equal(collectives.reduce_scatter(mine), torch.ones(LARGE_BYTES // 2))


@ranks(2)
def test_negative_sizes_are_refused_before_anything_is_sent(rank: int) -> None:
    with open_groups(PAIR, ["dp"]) as opened:
        collectives, x = opened["dp"].collectives, torch.ones(4)
        # The two lists are those of an exchange that would fit if it could be.
        sizes = [5, -1] if rank == 0 else [-1, 5]
        with pytest.raises(LayoutError, match="negative"):
            collectives.all_to_all(x, send_sizes=sizes, receive_sizes=sizes)
        with pytest.raises(LayoutError, match="negative"):
            collectives.reduce_scatter(x, sizes=[-1, 5])
        with pytest.raises(LayoutError, match="negative"):
            collectives.all_gather(x, sizes=[4, -4] if rank == 0 else [-4, 4])
        assert_equal(collectives.all_reduce(x), torch.full((4,), 2.0))


KIB = 1024 // 4
BORDERS = (256 * KIB, 3 * 128 * KIB, 8 * 128 * KIB)
SIZES = (*chain.from_iterable((n - 1, n, n + 1) for n in BORDERS), 3 * 1024 * KIB)


@ranks(2)
def test_values_do_not_depend_on_the_size(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        collectives = groups["dp"].collectives
        for n in SIZES:
            # Sums of small integers are exact, and no two neighbours are equal.
            both = [(torch.arange(2 * n) * (7 + r) % 1021).float() for r in range(2)]
            pending = collectives.reduce_scatter_async(both[rank])
            gathered = collectives.all_gather(both[rank][:n])
            assert_equal(gathered, torch.cat([x[:n] for x in both]))
            assert_equal(pending.wait(), (both[0] + both[1])[rank * n : (rank + 1) * n])
