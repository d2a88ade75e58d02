"""Distributed collectives on gloo ranks, against virtual ones and against counting the bytes."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import socket
import stat
import struct
import termios
import time
import warnings
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.autograd import DifferentiableCollectives, differentiable
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives, OperationName
from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, ranks, run_twin

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers that differ per rank and element, small enough to add exactly in bf16."""
    numbers = torch.arange(torch.Size(shape).numel()) * 7 + rank * 3
    return (numbers % 23).to(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
@ranks(3)
def test_shards_are_gathered_and_sums_are_scattered(
    rank: int, dim: int, dtype: torch.dtype
) -> None:
    collectives = default_collectives()
    shards = [of_rank(r, 2, 3, 4, dtype=dtype) for r in range(3)]
    assert_equal(collectives.all_gather(shards[rank], dim=dim), torch.cat(shards, dim))
    pending = collectives.all_gather_async(shards[rank], dim=dim)
    assert_equal(pending.wait(), torch.cat(shards, dim))
    assert pending.wait() is pending.wait()
    addends = [of_rank(r, 3, 6, 9, dtype=dtype) for r in range(3)]
    expected = torch.stack(addends).sum(0).chunk(3, dim)[rank].contiguous()
    assert_equal(collectives.reduce_scatter(addends[rank], dim=dim), expected)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (0, 5, 1), (4, 0, 0), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@ranks(3)
def test_uneven_shards_are_gathered_and_scattered(
    rank: int, sizes: tuple[int, ...], dim: int
) -> None:
    shards = [of_rank(r, *((n, 2) if dim == 0 else (2, n))) for r, n in enumerate(sizes)]
    whole = torch.cat(shards, dim)
    assert_equal(default_collectives().all_gather(shards[rank], dim=dim, sizes=sizes), whole)
    addends = [of_rank(r, *whole.shape) for r in range(3)]
    expected = torch.stack(addends).sum(0).split(sizes, dim)[rank]
    for result in (
        default_collectives().reduce_scatter(addends[rank], dim=dim, sizes=sizes),
        default_collectives().reduce_scatter_async(addends[rank], dim=dim, sizes=sizes).wait(),
    ):
        assert_equal(result, expected.contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(3)
def test_all_reduce_adds_and_finds_the_largest(rank: int, dtype: torch.dtype) -> None:
    addends = [of_rank(r, 4, 5, dtype=dtype) for r in range(3)]
    before = addends[rank].clone()
    assert_equal(default_collectives().all_reduce(addends[rank]), torch.stack(addends).sum(0))
    assert_equal(addends[rank], before)
    largest = torch.stack(addends).amax(0)
    assert_equal(default_collectives().all_reduce_async(addends[rank], op="max").wait(), largest)


@ranks(3)
def test_inputs_and_outputs_need_not_be_contiguous(rank: int) -> None:
    collectives = default_collectives()
    addends = [of_rank(r, 6, 3).t() for r in range(3)]
    mine, total = addends[rank], torch.stack(addends).sum(0)
    assert not mine.is_contiguous()
    assert_equal(collectives.all_reduce(mine), total)
    assert_equal(collectives.all_gather(mine), torch.cat(addends))
    assert_equal(collectives.reduce_scatter(mine), total[rank : rank + 1].contiguous())
    assert_equal(collectives.broadcast(mine, source=2), addends[2].contiguous())
    strided = torch.empty(3, 6).double().t().contiguous().t()
    assert collectives.all_reduce(mine, out=strided) is strided
    assert_equal(strided.contiguous(), total)
    in_place = mine.clone(memory_format=torch.preserve_format)
    collectives.all_reduce(in_place, out=in_place)
    assert_equal(in_place.contiguous(), total)


@pytest.mark.parametrize("dim", [0, 1])
@ranks(3)
def test_all_to_all_sends_uneven_parts(rank: int, dim: int) -> None:
    # Rank r sends r + peer positions to each peer, so the matrix of sizes is symmetric.
    sizes = [rank + peer for peer in range(3)]
    shape = (sum(sizes), 2) if dim == 0 else (2, sum(sizes))
    mine = of_rank(rank, *shape)
    received = default_collectives().all_to_all(
        mine, send_sizes=sizes, receive_sizes=sizes, dim=dim
    )
    expected = []
    for peer in range(3):
        theirs = [peer + r for r in range(3)]
        whole = of_rank(peer, *((sum(theirs), 2) if dim == 0 else (2, sum(theirs))))
        expected.append(whole.split(theirs, dim)[rank])
    assert_equal(received, torch.cat(expected, dim))


@ranks(3)
def test_gradients_are_those_of_the_sum_of_all_losses(rank: int) -> None:
    """Each operation against the same computed by autograd from all ranks' inputs at once."""
    collectives = DifferentiableCollectives(SpyCollectives(default_collectives()))
    inputs = [of_rank(r, 6, 3).requires_grad_() for r in range(3)]
    weights = [of_rank(r + 5, 18, 3) for r in range(3)]
    operations = [
        ("all_gather", {}, lambda r: torch.cat(inputs)),
        ("all_gather", {"dim": 1}, lambda r: torch.cat(inputs, 1)),
        ("reduce_scatter", {}, lambda r: sum(inputs).chunk(3)[r]),
        ("reduce_scatter", {"sizes": [1, 2, 3]}, lambda r: sum(inputs).split([1, 2, 3])[r]),
        ("all_reduce", {}, lambda r: sum(inputs)),
        ("all_to_all", {}, lambda r: torch.cat([x.chunk(3)[r] for x in inputs])),
        ("broadcast", {"source": 1}, lambda r: inputs[1]),
    ]
    for (name, options, single), is_async in itertools.product(operations, (False, True)):
        results = [single(r) for r in range(3)]
        uppers = [
            w.flatten()[: y.numel()].view(y.shape) for w, y in zip(weights, results, strict=True)
        ]
        total = sum((y * w).sum() for y, w in zip(results, uppers, strict=True))
        expected = torch.autograd.grad(total, inputs, materialize_grads=True)[rank]
        mine = inputs[rank].detach().clone().requires_grad_()
        result = run_twin(collectives, name, is_async, mine, **options)
        assert_equal(result.detach(), results[rank].detach().contiguous())
        (gradient,) = torch.autograd.grad(result, mine, uppers[rank])
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0, msg=name)


@ranks(3)
def test_the_spy_sees_forward_and_backward_with_their_least_bytes(rank: int) -> None:
    spy = SpyCollectives(default_collectives())
    x = torch.ones(6, 4, dtype=torch.float32, requires_grad=True)
    differentiable(spy).all_gather(x).sum().backward()
    assert spy.counts == {"all_gather": 1, "reduce_scatter": 1}
    assert [call.sent_bytes for call in spy.calls] == [2 * 96, 3 * 96 * 2 // 3]
    assert [call.is_async for call in spy.calls] == [False, False]
    spy.clear()
    spy.all_reduce_async(x.detach()).wait()
    spy.broadcast(x.detach(), source=1)
    assert [call.sent_bytes for call in spy.calls] == [128, 96 if rank == 1 else 0]
    assert [call.is_async for call in spy.calls] == [True, False]


def tcp_bytes_sent() -> int:
    """Payload bytes that this process has sent over TCP and that were acknowledged.

    Read from the kernel for each socket (`tcpi_bytes_acked`, a 64-bit field at byte 120 of
    `struct tcp_info`), so that traffic of other processes does not count.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                # A loaded peer acknowledges late, also what it has received and used.
                while fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)) != bytes(4):
                    time.sleep(0.001)
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 120)[0]
        except OSError:
            continue
    return total


def check_bytes_of_reduce_scatter(size: int) -> None:
    ours, plain = bytes_of_reduce_scatter()
    ideal = (size - 1) * (1 << 20) // size
    # What is more than ideal is gloo's headers and the barriers around the count.
    assert ideal <= ours <= ideal * 1.01 + 4096, f"{ours} bytes sent, {ideal} are needed"
    assert plain >= 1.5 * ours, f"torch's own sends {plain}, ours {ours}"


@ranks(2)
def test_reduce_scatter_moves_no_more_than_it_must_on_two_ranks(rank: int) -> None:
    check_bytes_of_reduce_scatter(2)


@ranks(4)
def test_reduce_scatter_moves_no_more_than_it_must_on_four_ranks(rank: int) -> None:
    check_bytes_of_reduce_scatter(4)


def _torch_reduce_scatter(shard: Tensor, x: Tensor) -> None:
    # Torch 2.13 renamed it, and warns at each call by the old name.
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    run(shard, x)


def bytes_of_reduce_scatter() -> tuple[int, int]:
    """Bytes one rank sends for an input of 1 MiB: by our reduce-scatter, and by torch's."""
    size = dist.get_world_size()
    x = torch.ones(1 << 18, dtype=torch.float32)
    shard = torch.empty((1 << 18) // size)
    collectives = default_collectives()
    counts = []
    for run in (
        lambda: collectives.reduce_scatter(x, out=shard),
        lambda: _torch_reduce_scatter(shard, x),
    ):
        run()
        dist.barrier()
        before = tcp_bytes_sent()
        run()
        dist.barrier()
        counts.append(tcp_bytes_sent() - before)
        # A rank that leaves closes connections, which then do not count.
        dist.barrier()
    return counts[0], counts[1]


@ranks(3)
def test_a_gather_of_uneven_shards_moves_no_padding(rank: int) -> None:
    collectives, sizes = default_collectives(), (3 << 16, 1 << 16, 0)
    x = torch.ones(sizes[rank])
    collectives.all_gather(x, sizes=sizes)
    dist.barrier()
    before = tcp_bytes_sent()
    collectives.all_gather(x, sizes=sizes)
    dist.barrier()
    sent, ideal = tcp_bytes_sent() - before, 2 * sizes[rank] * 4
    dist.barrier()
    # What is more is gloo's headers and the barrier.
    assert ideal <= sent <= ideal + 4096, f"{sent} bytes sent, {ideal} are needed"


def test_on_one_rank_everything_is_the_input_itself() -> None:
    alone: Collectives = IdentityCollectives()
    x = torch.arange(4.0, requires_grad=True)
    for name in get_args(OperationName):
        assert getattr(alone, name)(x) is getattr(alone, f"{name}_async")(x).wait() is x
    assert differentiable(alone) is alone
    out = torch.zeros(4)
    assert alone.all_gather(x.detach(), out=out) is out
    assert_equal(out, x.detach())
    assert alone.all_reduce(out, out=out) is out


@ranks(2)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(rank: int) -> None:
    collectives = default_collectives()
    x = torch.zeros(3, 2)
    for run, words in (
        (lambda: collectives.reduce_scatter(x), "3 positions over 2 ranks"),
        (lambda: collectives.reduce_scatter(x, sizes=[1, 1]), r"sizes \[1, 1\]"),
        (lambda: collectives.all_gather(x, sizes=[2, 2]), r"sizes \[2, 2\]"),
        (lambda: collectives.all_to_all(x), "3 positions for 2 ranks"),
        (lambda: collectives.all_to_all(x, send_sizes=[1, 2]), "Pass both"),
        (
            lambda: collectives.all_to_all(x, send_sizes=[1, 1], receive_sizes=[1, 1]),
            "parts sent are the whole",
        ),
    ):
        with pytest.raises(LayoutError, match=words):
            run()
    with pytest.raises(UnsupportedError, match="out="):
        differentiable(collectives).all_reduce(x, out=x)
    with pytest.raises(UnsupportedError, match="'max'"):
        differentiable(collectives).all_reduce(x, op="max")


OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@pytest.mark.parametrize("name", OPERATIONS)
@ranks(2)
def test_results_have_the_dtype_and_no_gradient_and_torch_nothing_to_warn_of(
    rank: int, name: str
) -> None:
    run = getattr(default_collectives(), name)
    for dtype in (torch.int32, torch.uint8):
        assert run(torch.ones(4, dtype=dtype)).dtype == dtype
    # The second goes between pairs, where gathers and sums do.
    for length in (4, 300_000):
        x = torch.ones(length, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = run(x)
        out = torch.empty_like(result)
        assert not result.requires_grad
        assert run(x, out=out) is out
        assert not out.requires_grad
        assert_equal(out, result)


def two_columns(rank: int, rows: int) -> Tensor:
    return ((torch.arange(rows * 2) * 7 + rank * 5) % 23).float().view(2, rows)


# 64 bytes, 400 KB, 4 MB: below and above the 256 KiB from which on gloo goes between pairs.
@pytest.mark.parametrize("rows", [8, 50_000, 500_000])
@ranks(2)
def test_a_dropped_input_is_sent_as_it_was(rank: int, rows: int) -> None:
    """Rank 1 comes to each operation only when rank 0 has dropped its input and filled memory."""
    collectives, store = default_collectives(), dist.distributed_c10d._get_default_store()
    transposed = [two_columns(r, rows).t() for r in range(2)]
    halves = torch.stack(transposed).sum(0).chunk(2)
    expected = {
        "all_gather": torch.cat(transposed),
        "reduce_scatter": halves[rank].contiguous(),
        "all_to_all": torch.cat([x.chunk(2)[rank] for x in transposed]),
    }
    for name, result in expected.items():
        ready = f"{name} {rows} is on its way"
        if rank == 1:
            store.wait([ready])
        # Nobody but the operation has the dense copy, nor the tensor itself.
        pending = getattr(collectives, f"{name}_async")(two_columns(rank, rows).t())
        gc.collect()
        garbage = [torch.full((rows * 2,), float("nan")) for _ in range(8)]
        if rank == 0:
            store.set(ready, "")
        assert_equal(pending.wait(), result)
        assert all(bool(part.isnan().all()) for part in garbage)
