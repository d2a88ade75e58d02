"""One `Call` for all operations: implementations write `run` and `start`, and no named method."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from pcomm.core.collectives.instrumented import InstrumentedCollectives, SpyCollectives
from pcomm.core.collectives.protocol import Call, Collectives, Pending

X, OUT = torch.arange(6.0), torch.empty(6)


class Noted(Collectives):
    """Notes calls, and by which of the two methods they came."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.ran: list[Call] = []
        self.started: list[Call] = []

    def run(self, call: Call) -> Tensor:
        self.ran.append(call)
        return call.x

    def start(self, call: Call) -> Pending:
        self.started.append(call)
        return Pending.ready(call.x)


CASES: list[tuple[str, dict[str, Any], Call]] = [
    ("all_gather", {}, Call("all_gather", X)),
    (
        "all_gather",
        {"dim": -1, "sizes": [6, 1], "out": OUT},
        Call("all_gather", X, OUT, -1, [6, 1]),
    ),
    ("reduce_scatter", {}, Call("reduce_scatter", X)),
    (
        "reduce_scatter",
        {"dim": 1, "sizes": [2, 4], "out": OUT},
        Call("reduce_scatter", X, OUT, 1, [2, 4]),
    ),
    ("all_reduce", {}, Call("all_reduce", X)),
    ("all_reduce", {"op": "max", "out": X}, Call("all_reduce", X, X, op="max")),
    ("all_to_all", {}, Call("all_to_all", X)),
    (
        "all_to_all",
        {"send_sizes": [1, 5], "receive_sizes": [1, 2], "dim": 2, "out": OUT},
        Call("all_to_all", X, OUT, 2, [1, 5], [1, 2]),
    ),
    ("broadcast", {}, Call("broadcast", X)),
    ("broadcast", {"source": 1, "out": OUT}, Call("broadcast", X, OUT, source=1)),
]


def assert_same(found: Call, expected: Call) -> None:
    for field in dataclasses.fields(Call):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one is other if isinstance(other, Tensor) else one == other, field.name


@pytest.mark.parametrize("twin", ["", "_async"])
@pytest.mark.parametrize(
    ("name", "options", "expected"), CASES, ids=[f"{case[0]} {sorted(case[1])}" for case in CASES]
)
def test_a_named_method_makes_one_call(
    name: str, options: dict[str, Any], expected: Call, twin: str
) -> None:
    noted = Noted()
    result = getattr(noted, name + twin)(X, **options)
    (call,) = noted.started if twin else noted.ran
    assert isinstance(result, Pending) == bool(twin)
    assert_same(call, expected)


@pytest.mark.parametrize("call", [case[2] for case in CASES], ids=lambda c: c.operation)
def test_another_input_leaves_all_else_as_it_is(call: Call) -> None:
    other = call.with_input(X * 2)
    assert other.x is not call.x
    assert_same(dataclasses.replace(other, x=X), call)


def test_a_wrapper_passes_on_the_call_itself() -> None:
    noted = Noted()
    wrapped = SpyCollectives(InstrumentedCollectives(noted))
    call, later = Call("all_reduce", X), Call("broadcast", X)
    assert wrapped.run(call) is X
    assert wrapped.start(later).wait() is X
    assert [noted.ran, noted.started] == [[call], [later]]
    assert [(c.operation, c.is_async) for c in wrapped.calls] == [
        ("all_reduce", False),
        ("broadcast", True),
    ]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (Call("all_gather", torch.ones(2, 3)), "all_gather float32 dim 0 [2, 3]"),
        (
            Call("all_gather", torch.ones(2, 3), None, -1, (3, 4)),
            "all_gather float32 dim 1 [2, *] sizes [3, 4]",
        ),
        (
            Call("reduce_scatter", torch.ones(2, 3), None, 1, [1, 2]),
            "reduce_scatter sum float32 dim 1 [2, 3] sizes [1, 2]",
        ),
        (Call("all_reduce", torch.ones(2), op="max"), "all_reduce max float32 [2]"),
        (Call("all_to_all", torch.ones(4, dtype=torch.int8)), "all_to_all int8 dim 0 [4]"),
        (
            Call("all_to_all", torch.ones(4), None, 0, [1, 3], [1, 0]),
            "all_to_all float32 dim 0 [*]",
        ),
        (Call("broadcast", torch.ones(()), source=1), "broadcast from 1 float32 []"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_line_that_ranks_compare(call: Call, line: str) -> None:
    assert call.agreed == line


def test_the_fewest_bytes_that_a_rank_sends() -> None:
    x = torch.ones(6)
    assert Call("all_gather", x).sent_bytes(0, 3) == 48
    assert Call("reduce_scatter", x).sent_bytes(0, 3) == 16
    assert Call("reduce_scatter", x, None, 0, [1, 2, 3]).sent_bytes(2, 3) == 12
    assert Call("all_reduce", x).sent_bytes(0, 3) == 32
    assert Call("all_to_all", x, None, 0, [0, 6, 0], [0, 6, 1]).sent_bytes(1, 3) == 0
    assert [Call("broadcast", x, source=1).sent_bytes(rank, 3) for rank in (0, 1)] == [0, 24]
