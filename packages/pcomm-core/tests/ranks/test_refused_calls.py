"""Calls that cannot be carried out: refused where they are made, before anything is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, default_group, ranks
from pcomm.core.testing.virtual import VirtualCollectives
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


def check_refusals(collectives: Collectives) -> list[OperationName]:
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


@ranks(2)
def test_unknown_choices_are_refused_before_anything_is_sent(rank: int) -> None:
    """On one rank after the other: if the other one is sent anything, the sum is wrong."""
    ours = default_collectives()
    refused = check_refusals(IdentityCollectives())
    for collectives in (ours, SpyCollectives(ours)):
        for turn in range(2):
            if rank == turn:
                assert check_refusals(collectives) == refused
            else:
                for name in refused:
                    collectives.skip(name)
            total = collectives.all_reduce(torch.tensor([float(rank + 1)]))
            assert_equal(total, torch.tensor([3.0]))
    with pytest.raises(ConfigError, match="op='min'"):
        DifferentiableCollectives(ours).all_reduce(ROW, op="min")  # type: ignore[arg-type]
    # A spy looks up the size of its rank before the call is refused.
    for sizes in ([4], [4, 4, 4]):
        with pytest.raises(LayoutError, match="reduce_scatter: sizes"):
            SpyCollectives(ours).reduce_scatter(ROW, sizes=sizes)


def test_alone_and_on_virtual_ranks_the_same_is_refused() -> None:
    check_refusals(IdentityCollectives())
    virtual = VirtualCollectives(0, 2, [], threading.Barrier(2))
    for name, x, options, error, words in WRONG:
        with pytest.raises(error, match=words):
            getattr(virtual, name)(x, **options)


# Below and above the size from which gathers and reduce-scatters go between pairs. What is wrong
# may leave open which of the two the other rank takes.
LEFT_OUT: list[tuple[OperationName, int, dict[str, Any]]] = [
    *((name, n, {"out": torch.zeros(3)}) for name in get_args(OperationName) for n in (2, 1 << 17)),
    *((name, n, {"dim": 7}) for name in ("all_gather", "reduce_scatter") for n in (2, 1 << 17)),
    *((name, 1 << 17, {"sizes": [1, 1]}) for name in ("all_gather", "reduce_scatter")),
    ("all_to_all", 4, {"send_sizes": [2, 2]}),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@ranks(2)
def test_after_a_refused_call_the_next_one_gets_no_bytes_of_it(rank: int, is_async: bool) -> None:
    """Rank 1 has begun what rank 0 is refused; both go on with the next operations."""
    twin = "_async" if is_async else ""
    for name, length, wrong in LEFT_OUT:
        with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
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
