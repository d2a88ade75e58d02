"""The interpreter of tests computes what Triton's own one computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

import triton
import triton.language as tl
from triton.runtime import interpreter

from core_support.interpreter import interpreted


@pytest.fixture
def own() -> Iterator[dict[str, Any]]:
    """What Triton has, while tests have theirs."""
    before = dict(vars(interpreter))
    before["check"] = interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl
    with interpreted([]):
        assert interpreter._get_np_dtype is not before["_get_np_dtype"]
        yield before
    assert interpreter._get_np_dtype is before["_get_np_dtype"]
    assert interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl == before["check"]


def compute(left, right, out, NAME: tl.constexpr) -> None:
    places = tl.arange(0, 4)
    a, b = tl.load(left + places), tl.load(right + places)
    if NAME == "add":
        result = a + b
    elif NAME == "sub":
        result = a - b
    else:
        result = a * b
    tl.store(out + places, result)


@pytest.mark.parametrize(
    ("name", "dtype", "left", "right"),
    [
        ("add", torch.int32, 2**31 - 1, 1),
        ("sub", torch.uint32, 1, 2),
        ("mul", torch.int32, 2**30, -3),
        ("mul", torch.uint8, 85, 4),
    ],
)
def test_integers_wrap_around_as_in_the_interpreter_of_triton(
    own: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
    left: int,
    right: int,
) -> None:
    kernel = triton.jit(compute)
    a, b = (torch.tensor([0, 0, 1, number], dtype=dtype) for number in (left, right))
    found = []
    for _ in range(2):
        out = torch.zeros_like(a)
        kernel[(1,)](a, b, out, name)
        found.append(out.tolist())
        semantic = interpreter.interpreter_semantic
        monkeypatch.setattr(semantic, "binary_op_sanitize_overflow_impl", own["check"])
    assert found[0] == found[1]
    operation = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}[name]
    assert found[0][3] != operation(left, right)
    assert (found[0][3] - operation(left, right)) % (1 << torch.iinfo(dtype).bits) == 0


def test_types_of_numbers_are_those_of_triton(own: dict[str, Any]) -> None:
    scalars = [tl.int1, tl.bfloat16, *(getattr(tl, f"float{bits}") for bits in (16, 32, 64))]
    scalars += [getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
    scalars += [tl.float8e5, tl.float8e4nv]
    for kind in [*scalars, *map(tl.pointer_type, scalars)]:
        for one in (kind, tl.block_type(kind, [4]), kind):
            assert interpreter._get_np_dtype(one) == own["_get_np_dtype"](one), one
