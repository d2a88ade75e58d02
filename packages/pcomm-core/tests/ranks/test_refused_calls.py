"""Calls that cannot be carried out are refused before anything is sent; an `out` over its input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.autograd import DifferentiableCollectives
from pcomm.core.collectives.distributed import DistributedCollectives
from pcomm.core.collectives.gloo import GlooCollectives
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives, OperationName
from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    LayoutError,
    PcommError,
    TopologyError,
    UnsupportedError,
)
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, default_group, ranks, run_twin
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.core.topology import Topology

NUMBER, ROW = torch.tensor(1.0), torch.arange(4.0)
# Operation, input, options, and the error. Two ranks; alone, sizes have one rank.
WRONG: list[tuple[OperationName, Tensor, dict[str, Any], type[PcommError], str]] = [
    ("all_reduce", ROW, {"op": "min"}, ConfigError, "op='min'"),
    # Booleans are added as a maximum, so that this one had a result.
    ("all_reduce", ROW > 1, {"op": "summ"}, ConfigError, "Did you mean 'sum'"),
    ("broadcast", ROW, {"source": 2}, TopologyError, "source=2"),
    ("broadcast", ROW, {"source": -1}, TopologyError, "source=-1"),
    ("all_gather", NUMBER, {}, LayoutError, "all_gather: dim=0"),
    *(
        (name, ROW, {"dim": dim}, LayoutError, f"{name}: dim={dim}")
        for name in ("all_gather", "reduce_scatter", "all_to_all")
        for dim in (1, -2)
    ),
]
ALL_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def check_choices(collectives: Collectives) -> list[OperationName]:
    """The operations that were refused, in order."""
    refused: list[OperationName] = []
    for name, x, options, error, words in WRONG:
        before = x.clone()
        for twin in ("", "_async"):
            with pytest.raises(error, match=words):
                getattr(collectives, name + twin)(x, **options)
            refused.append(name)
            if name in ("all_reduce", "broadcast"):
                for out in (x, torch.zeros_like(x)):
                    untouched = out.clone()
                    with pytest.raises(error, match=words):
                        getattr(collectives, name + twin)(x, out=out, **options)
                    refused.append(name)
                    assert_equal(out, untouched)
        assert_equal(x, before)
    return refused


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


def check_unfit(collectives: Collectives, length: int) -> list[OperationName]:
    """The operations that were refused, in order."""
    refused: list[OperationName] = []
    for name in get_args(OperationName):
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


CHECKS: dict[str, Callable[[Collectives], list[OperationName]]] = {
    "choices": check_choices,
    "out": lambda c: check_unfit(c, 16),
    "large out": lambda c: check_unfit(c, 75_000),
}


@pytest.mark.parametrize("what", CHECKS)
@ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent(rank: int, what: str) -> None:
    """On one rank after the other: if the other one is sent anything, the sum is wrong."""
    ours, check = default_collectives(), CHECKS[what]
    refused = check(IdentityCollectives())
    for collectives in (ours, SpyCollectives(ours)):
        for turn in range(2):
            if rank == turn:
                assert check(collectives) == refused
            else:
                for name in refused:
                    collectives.skip(name)
            total = collectives.all_reduce(torch.tensor([float(rank + 1)]))
            assert_equal(total, torch.tensor([3.0]))
    if what != "choices":
        check(DistributedCollectives(default_group()))
        return
    with pytest.raises(ConfigError, match="op='min'"):
        DifferentiableCollectives(ours).all_reduce(ROW, op="min")  # type: ignore[arg-type]
    # A spy looks up the size of its rank before the call is refused.
    for sizes in ([4], [4, 4, 4]):
        with pytest.raises(LayoutError, match="reduce_scatter: sizes"):
            SpyCollectives(ours).reduce_scatter(ROW, sizes=sizes)


def test_on_virtual_ranks_the_same_is_refused() -> None:
    virtual = VirtualCollectives(0, 2, [], threading.Barrier(2))
    for name, x, options, error, words in WRONG:
        with pytest.raises(error, match=words):
            getattr(virtual, name)(x, **options)

    def on_rank(collectives: VirtualCollectives) -> None:
        with pytest.raises(LayoutError, match="all_gather: out="):
            collectives.all_gather(ROW, out=torch.zeros(4))

    run_virtual(on_rank, 2)


# Below and above the size from which gathers and reduce-scatters go between pairs. What is wrong
# may leave open which of the two the other rank takes.
LEFT_OUT: list[tuple[OperationName, int, dict[str, Any]]] = [
    *((name, n, {"out": torch.zeros(3)}) for name in get_args(OperationName) for n in (2, 1 << 17)),
    *((name, n, {"dim": 7}) for name in ("all_gather", "reduce_scatter") for n in (2, 1 << 17)),
    *((name, 1 << 17, {"sizes": [1, 1]}) for name in ("all_gather", "reduce_scatter")),
    ("all_to_all", 4, {"send_sizes": [2, 2]}),
]


# Gloo waits until the time limit for what has arrived in part when a group is abandoned.
LIMIT_S = 30.0


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@ranks(2, leaves="gloo's thread of an operation of which a part had arrived")
def test_after_a_refused_call_the_next_one_gets_no_bytes_of_it(rank: int, is_async: bool) -> None:
    """Rank 1 has begun what rank 0 is refused; both go on with the next operations."""
    twin = "_async" if is_async else ""
    for name, length, wrong in LEFT_OUT:
        dp = GroupSpec("dp", options=CommOptions(timeout_s=LIMIT_S))
        with open_groups(Topology({"dp": 2}), [dp]) as groups:
            c, x = groups["dp"].collectives, torch.full((length,), 1.0 + rank)
            if rank == 0:
                with pytest.raises(LayoutError, match=name):
                    getattr(c, name + twin)(x, **wrong)
            else:
                left = getattr(c, f"{name}_async")(x)
            numbers = (10.0, 20.0)
            pending = [
                getattr(c, f"{name}_async")(torch.full((length,), n + rank)) for n in numbers
            ]
            if rank == 0:
                for n, p in zip(numbers, pending, strict=True):
                    both = [torch.full((length,), n + r) for r in range(2)]
                    assert_equal(p.wait(), RESULTS[name](both))
            dist.barrier()
            groups.abandon()
            if rank == 1:
                with pytest.raises(RuntimeError):
                    left.wait()


# Of rank 0.
RESULTS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "all_gather": torch.cat,
    "reduce_scatter": lambda xs: (xs[0] + xs[1]).chunk(2)[0],
    "all_reduce": lambda xs: xs[0] + xs[1],
    "all_to_all": lambda xs: torch.cat([x.chunk(2)[0] for x in xs]),
    "broadcast": lambda xs: xs[0],
}


@ranks(2)
def test_where_numbers_cannot_be_left_out_no_operation_follows_a_refused_one(rank: int) -> None:
    """As on NCCL: this rank is out of step, and an error that names the call says so."""
    plain, other = (DistributedCollectives(default_group()) for _ in range(2))
    x = torch.ones(2)
    with pytest.raises(ConfigError, match="op='min'"):
        plain.all_reduce(x, op="min", out=x)  # type: ignore[arg-type]
    for call in (plain.all_gather, plain.broadcast_async):
        with pytest.raises(ClosedError, match="an earlier all_reduce of it was refused"):
            call(x)
    with pytest.raises(UnsupportedError, match="out="):
        DifferentiableCollectives(other).all_gather(x, out=x)
    with pytest.raises(ClosedError, match="an earlier all_gather of it was refused"):
        other.all_reduce(x)


def is_refused(collectives: Collectives, name: str, x: Tensor, error: type[Exception]) -> bool:
    try:
        getattr(collectives, name)(x)
    except error:
        return True
    return False


@ranks(2)
def test_on_gloo_a_dtype_is_refused_where_gloo_has_no_operation_for_it(rank: int) -> None:
    """What torch itself refuses, when it is asked to move or add a few numbers, is the measure."""
    ours = default_collectives()
    assert isinstance(ours, GlooCollectives)
    for dtype in ALL_DTYPES:
        x = torch.ones(4).to(dtype)
        for name in ("all_gather", "all_reduce", "all_to_all", "broadcast"):
            # Made anew, since none takes another call after one that was refused.
            plain = DistributedCollectives(default_group())
            expected = is_refused(plain, name, x, RuntimeError)
            assert is_refused(ours, name, x, UnsupportedError) == expected, (dtype, name)
            if expected:
                # And not at the wait.
                with pytest.raises(UnsupportedError, match=f"{name}: (.|\n)*{dtype}"):
                    getattr(ours, f"{name}_async")(x)


@ranks(2)
def test_bytes_of_any_dtype_are_gathered_between_pairs(rank: int) -> None:
    collectives = default_collectives()
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint32):
        parts = [torch.full((300_000,), float(r + 1)).to(dtype) for r in range(2)]
        gathered = collectives.all_gather(parts[rank])
        assert torch.equal(gathered.view(torch.uint8), torch.cat(parts).view(torch.uint8))
    both = torch.full((300_000,), 3, dtype=torch.int16)
    total = collectives.reduce_scatter(torch.full((600_000,), rank + 1, dtype=torch.int16))
    assert_equal(total, both)


OPERATIONS = get_args(OperationName)


def numbers(rank: int, *shape: int) -> Tensor:
    """Whole numbers that differ per rank and element."""
    return ((torch.arange(torch.Size(shape).numel()) * 7 + rank * 5) % 23).float().view(shape)


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
