"""The packed convolution against torch's on each sequence, with its halo in front."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gdn_cp_bench.slow_decay import gradients, offsets, relative_error
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.assertions import assert_as_accurate, assert_equal
from pcomm.gdn_cp.ops.causal_conv1d import causal_convolution, convolution_step

Tensors = tuple[Tensor, ...]
Run = Callable[..., Tensors]


def inputs_of(
    lengths: tuple[int, ...], width: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensors:
    """Tokens, weight, bias and halo of 3 channels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(lengths), 3), (3, width), (3,), (len(lengths), width - 1, 3))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(x.to(dtype).requires_grad_() for x in drawn)


def each_alone(
    x: Tensor, weight: Tensor, bias: Tensor, halo: Tensor, cu: tuple[int, ...]
) -> Tensors:
    """Every sequence by itself, through `conv1d`."""
    outputs, halos = [x[:0]], [halo[:0]]
    for n, (start, stop) in enumerate(pairwise(cu)):
        inputs = torch.cat([halo[n], x[start:stop]])
        if stop > start:
            y = F.conv1d(inputs.mT[None], weight[:, None], bias, groups=len(weight))
            outputs.append(F.silu(y[0].mT))
        halos.append(inputs[None, stop - start :])
    return torch.cat(outputs), torch.cat(halos)


def packed(x: Tensor, weight: Tensor, bias: Tensor, halo: Tensor, cu: tuple[int, ...]) -> Tensors:
    return causal_convolution(x, weight, cu_seqlens=cu, bias_D=bias, initial_halo=halo)


def with_gradients(run: Run, inputs: Tensors, cu: tuple[int, ...]) -> Tensors:
    outputs = run(*inputs, cu)
    return (*(x.detach() for x in outputs), *gradients(outputs, inputs))


@given(
    st.lists(st.integers(0, 9), max_size=8), st.sampled_from([1, 2, 4, 7]), st.integers(0, 2**31)
)
@settings(max_examples=30, deadline=None)
def test_any_pack_is_as_each_alone(lengths: list[int], width: int, seed: int) -> None:
    inputs, cu = inputs_of(tuple(lengths), width, seed=seed), offsets(lengths)
    ours, theirs = (with_gradients(run, inputs, cu) for run in (packed, each_alone))
    assert relative_error(ours, theirs) < 1e-13


def test_torch_finds_the_same_gradients_by_differences() -> None:
    inputs = inputs_of((2, 0, 5), 3)
    assert torch.autograd.gradcheck(lambda *x: packed(*x, (0, 2, 2, 7)), inputs)


@given(st.integers(0, 12), st.data())
@settings(max_examples=20, deadline=None)
def test_a_sequence_cut_anywhere_is_the_whole(length: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, length))
    x, weight, bias, halo = inputs = inputs_of((length,), 4)
    whole = packed(*inputs, (0, length))
    first, middle = packed(x[:cut], weight, bias, halo, (0, cut))
    second, last = packed(x[cut:], weight, bias, middle, (0, length - cut))
    parts = (torch.cat([first, second]), last)
    assert relative_error(parts, whole) < 1e-13
    assert relative_error(gradients(parts, inputs), gradients(whole, inputs)) < 1e-13


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    lengths = (5, 2, 6)
    x, weight, bias, halo = inputs_of(lengths, 4)
    changed = x.detach().clone()
    changed[:5], changed[7:] = torch.nan, torch.inf
    changed.requires_grad_()
    outputs = [packed(y, weight, bias, halo, offsets(lengths)) for y in (x, changed)]
    assert_equal(outputs[1][0][5:7], outputs[0][0][5:7])
    assert_equal(outputs[1][1][1], outputs[0][1][1])
    found = [gradients([o[5:7]], [y]) for (o, _), y in zip(outputs, (x, changed), strict=True)]
    assert_equal(found[1][0][5:7], found[0][0][5:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lower_dtypes_are_as_accurate_as_torch(dtype: torch.dtype) -> None:
    lengths = (40, 3, 0, 21)
    inputs, cu = inputs_of(lengths, 4, dtype=dtype), offsets(lengths)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    ours, plain, wanted = (
        with_gradients(run, leaves, cu)
        for run, leaves in ((packed, inputs), (each_alone, inputs), (each_alone, exact))
    )
    for mine, theirs, reference in zip(ours, plain, wanted, strict=True):
        assert mine.dtype == dtype
        assert_as_accurate(mine, theirs, reference, num_terms=4)


def test_tokens_and_gradients_of_any_strides_are_taken() -> None:
    x, weight, bias, halo = inputs_of((3, 6), 4)
    wide = torch.zeros(9, 8, dtype=x.dtype)
    wide[:, 2:5] = x.detach()
    strided = wide[:, 2:5].requires_grad_()
    ours = packed(strided, weight, bias, halo, (0, 3, 9))
    theirs = packed(x, weight, bias, halo, (0, 3, 9))
    arriving = torch.randn(3, 9, dtype=x.dtype).mT
    found = torch.autograd.grad(ours[0], [strided, weight], arriving)
    expected = torch.autograd.grad(theirs[0], [x, weight], arriving.contiguous())
    assert relative_error((*ours, *found), (*theirs, *expected)) == 0


@pytest.mark.parametrize("width", [1, 4])
def test_decoding_continues_a_prefill(width: int) -> None:
    x, weight, bias, halo = inputs = inputs_of((5, 2), width)
    whole, last = packed(*inputs, (0, 5, 7))
    ends, before = torch.tensor([4, 6]), torch.tensor([0, 1, 2, 3, 5])
    _, carried = packed(x[before], weight, bias, halo, (0, 4, 5))
    y, next_halo = convolution_step(x[ends], carried, weight, bias_D=bias)
    assert relative_error((y, next_halo), (whole[ends], last)) < 1e-13


def test_bias_and_halo_may_be_left_out() -> None:
    x, weight, bias, halo = inputs_of((3, 6), 4)
    left_out = causal_convolution(x, weight, cu_seqlens=(0, 3, 9))
    assert_equal(
        left_out, packed(x, weight, torch.zeros_like(bias), torch.zeros_like(halo), (0, 3, 9))
    )


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"cu_seqlens": (0, 6)}, LayoutError, "x: 8 tokens, and cu_seqlens ends at 6"),
        ({"weight_DW": torch.zeros(2, 4)}, ConfigError, r"x: shape \(8, 3\)"),
        ({"bias_D": torch.zeros(2)}, ConfigError, r"bias: shape \(2,\)"),
        ({"initial_halo": torch.zeros(1, 2, 3)}, ConfigError, "initial_halo"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = {"weight_DW": torch.zeros(3, 4), "cu_seqlens": (0, 8), **changed}
    with pytest.raises(error, match=words):
        causal_convolution(torch.zeros(8, 3), **given)
