"""Tensors that a caller names for results: refused where they do not fit, right where they alias.

Each case runs with shards below and above the 256 KiB from which on gloo goes between pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.autograd import DifferentiableCollectives
from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives, OperationName
from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, default_group, ranks, run_twin
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual

# Of two fp32 numbers: 128 bytes, 0.6 MB, and 2.4 MB, whose shards are more than eight chunks.
LENGTHS = [16, 75_000, 300_000]
OPERATIONS = get_args(OperationName)


def numbers(rank: int, *shape: int) -> Tensor:
    """Whole numbers that differ per rank and element."""
    return ((torch.arange(torch.Size(shape).numel()) * 7 + rank * 5) % 23).float().view(shape)


def result_length(name: str, length: int, size: int) -> int:
    return {"all_gather": length * size, "reduce_scatter": length // size}.get(name, length)


def unfit(shape: Sequence[int]) -> list[Tensor]:
    """Tensors that cannot take a fp32 result of `shape` on the CPU."""
    first, *rest = shape
    return [
        torch.zeros(first + 2, *rest),
        torch.zeros(first - 2, *rest),
        torch.zeros(0),
        # As many elements, in another arrangement.
        torch.zeros(1, *shape),
        torch.zeros(2, first // 2, *rest),
        # As many bytes, of other numbers.
        torch.zeros(*shape, dtype=torch.int32),
        torch.zeros(*shape, dtype=torch.float64),
        torch.zeros(*shape, dtype=torch.bfloat16),
        torch.zeros(*shape, device="meta"),
        # One place for several elements.
        torch.zeros(1, *rest).expand(*shape),
        *([torch.zeros(first + sum(rest)).as_strided((first, *rest), (1, 1))] if rest else []),
    ]


def check_refusals(collectives: Collectives, length: int) -> list[OperationName]:
    """The operations that were refused, in order."""
    refused: list[OperationName] = []
    for name in OPERATIONS:
        for x, dim in ((torch.ones(length, 2), 0), (torch.ones(2, length), 1)):
            along = result_length(name, length, collectives.size)
            options = {} if name in ("all_reduce", "broadcast") else {"dim": dim}
            for wrong in unfit((along, 2)):
                out = wrong if dim == 0 or wrong.dim() != 2 else wrong.t()
                shape, before = out.shape, None if out.is_meta else out.clone()
                for is_async in (False, True):
                    with pytest.raises(LayoutError, match=f"{name}: out="):
                        run_twin(collectives, name, is_async, x, out=out, **options)
                    refused.append(name)
                assert out.shape == shape
                if before is not None:
                    assert_equal(out, before)
    return refused


@pytest.mark.parametrize("length", LENGTHS[:2])
@ranks(2)
def test_an_out_that_does_not_fit_is_refused_before_anything_is_sent(
    rank: int, length: int
) -> None:
    """On one rank after the other: if the other one is sent anything, the sum is wrong."""
    ours = default_collectives()
    refused = check_refusals(IdentityCollectives(), length)
    for collectives in (ours, SpyCollectives(ours)):
        for turn in range(2):
            if rank == turn:
                assert check_refusals(collectives, length) == refused
            else:
                for name in refused:
                    collectives.skip(name)
            total = collectives.all_reduce(torch.tensor([float(rank + 1)]))
            assert_equal(total, torch.tensor([3.0]))
    with pytest.raises(UnsupportedError, match="out="):
        DifferentiableCollectives(ours).all_gather(torch.ones(length), out=torch.ones(3))
    check_refusals(DistributedCollectives(default_group()), length)


@pytest.mark.parametrize("length", [16, 75_000])
def test_alone_and_on_virtual_ranks_the_same_is_refused(length: int) -> None:
    check_refusals(IdentityCollectives(), length)

    def on_rank(collectives: VirtualCollectives) -> None:
        with pytest.raises(LayoutError, match="all_gather: out="):
            collectives.all_gather(torch.ones(4), out=torch.zeros(4))

    run_virtual(on_rank, 2)


def test_alone_sizes_are_compared_as_well() -> None:
    alone, x = IdentityCollectives(), torch.ones(4)
    for call in (
        lambda: alone.all_gather(x, sizes=[3]),
        lambda: alone.reduce_scatter_async(x, sizes=[2, 2]),
        lambda: alone.all_to_all(x, send_sizes=[4]),
        lambda: alone.all_to_all_async(x, send_sizes=[3], receive_sizes=[3]),
        lambda: alone.all_to_all(x, send_sizes=[4], receive_sizes=[3]),
    ):
        with pytest.raises(LayoutError, match="sizes"):
            call()
    assert alone.all_to_all(x, send_sizes=[4], receive_sizes=[4]) is x
    assert alone.all_gather(x, sizes=[4]) is x


def aliases(name: str, length: int, size: int) -> list[Callable[[], tuple[Tensor, Tensor]]]:
    """Pairs of an input and an out that lie over each other."""
    longer = max(length, result_length(name, length, size))
    shorter = result_length(name, length, size)

    def shifted(first: int, second: int) -> Callable[[], tuple[Tensor, Tensor]]:
        def make() -> tuple[Tensor, Tensor]:
            buffer = torch.zeros(longer + 8)
            return buffer[first : first + length], buffer[second : second + shorter]

        return make

    def interleaved() -> tuple[Tensor, Tensor]:
        buffer = torch.zeros(longer, 2)
        return buffer[:length, 0], buffer.view(-1)[:shorter]

    places = [shifted(0, 0), shifted(0, 3), shifted(5, 0), interleaved]
    for place in range(size):
        # Where torch and NCCL work in place, and where they do not.
        if name == "all_gather":
            places.append(shifted(place * length, 0))
        if name == "reduce_scatter":
            places.append(shifted(0, place * shorter))
    return places


@pytest.mark.parametrize("length", [16, 200_000])
@ranks(2)
def test_an_out_over_the_input_gets_what_another_one_gets(rank: int, length: int) -> None:
    for collectives in (
        default_collectives(),
        DistributedCollectives(default_group()),
    ):
        for name in OPERATIONS:
            mine = numbers(rank, length)
            expected = run_twin(collectives, name, False, mine.clone())
            for make in aliases(name, length, 2):
                for is_async in (False, True):
                    x, out = make()
                    x.copy_(mine)
                    assert run_twin(collectives, name, is_async, x, out=out) is out
                    assert_equal(out, expected)


@ranks(2)
def test_a_transposed_input_over_its_out(rank: int) -> None:
    collectives = default_collectives()
    for side in (4, 700):
        sum_of_both = numbers(0, side, side).t() + numbers(1, side, side).t()
        square = numbers(rank, side, side)
        collectives.all_reduce(square.t(), out=square)
        assert_equal(square, sum_of_both.contiguous())
        square = numbers(rank, side, side)
        collectives.broadcast(square.t(), source=1, out=square)
        assert_equal(square, numbers(1, side, side).t().contiguous())
    alone = numbers(0, 3, 3)
    IdentityCollectives().all_reduce(alone.t(), out=alone)
    assert_equal(alone, numbers(0, 3, 3).t().contiguous())


@pytest.mark.parametrize("length", [16, 200_000])
@ranks(2)
def test_an_out_that_requires_a_gradient_is_filled(rank: int, length: int) -> None:
    """A parameter, for example; the result carries no gradient on any backend."""
    for collectives in (
        default_collectives(),
        DistributedCollectives(default_group()),
        IdentityCollectives(),
    ):
        for name in OPERATIONS:
            x = numbers(rank, length)
            expected = run_twin(collectives, name, False, x)
            for is_async in (False, True):
                out = torch.zeros_like(expected, requires_grad=True)
                assert run_twin(collectives, name, is_async, x.requires_grad_(), out=out) is out
                assert_equal(out.detach(), expected.detach())
                assert out.is_leaf
                strided = torch.zeros(*expected.shape, 2, requires_grad=True)
                assert (
                    run_twin(collectives, name, is_async, x, out=strided[:, 0]).shape == out.shape
                )
                assert_equal(strided.detach()[:, 0].contiguous(), expected.detach())


@pytest.mark.parametrize("op", ["sum", "max"])
@ranks(2)
def test_an_all_reduce_in_place(rank: int, op: str) -> None:
    """Dense, strided, blocking or not, of every dtype; booleans stay booleans."""
    collectives = default_collectives()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for length in (10, 300_000):
            parts = [(numbers(r, length) % 2).to(dtype) for r in range(2)]
            both = torch.stack(parts)
            expected = both.amax(0) if op == "max" else both.sum(0, dtype=dtype)
            for is_async in (False, True):
                dense = parts[rank].clone()
                result = run_twin(collectives, "all_reduce", is_async, dense, op=op, out=dense)
                assert result is dense
                assert torch.equal(dense.view(torch.uint8), expected.view(torch.uint8))
                strided = torch.zeros(length, 2, dtype=dtype)[:, 0].copy_(parts[rank])
                run_twin(collectives, "all_reduce", is_async, strided, op=op, out=strided)
                assert_equal(strided.contiguous(), expected)
            fresh = collectives.all_reduce(parts[rank], op=op)  # type: ignore[arg-type]
            assert torch.equal(fresh.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("length", [16, 200_000])
@ranks(2)
def test_conjugated_and_negated_views_are_sent_as_what_they_mean(rank: int, length: int) -> None:
    """These views are dense, but their memory holds other numbers than they do."""
    collectives = default_collectives()
    lazy = [
        torch.complex(numbers(rank, length), numbers(rank + 1, length)).conj(),
        torch._neg_view(numbers(rank, length)),
    ]
    for x in lazy:
        assert x.is_contiguous()
        plain = x.resolve_conj().resolve_neg()
        for name in OPERATIONS:
            assert_equal(
                run_twin(collectives, name, True, x), run_twin(collectives, name, True, plain)
            )
