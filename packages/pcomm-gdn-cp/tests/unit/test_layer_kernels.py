"""The kernels around the recurrences, interpreted, against torch's form in fp64 and beside it.

Convolution with norms of queries and keys, gates, time steps and gated norms: values and all
gradients. What is read before it is written is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.interpreter import interpreted
from core_support.kernel_launches import recorded
from gdn_cp_bench.slow_decay import gradients, offsets
from gdn_cp_support.kernels import MODULES, TORCH, TRITON, assert_each_as_accurate, in_double
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.core.testing.assertions import assert_equal, poisoned_memory

Tensors = tuple[Tensor, ...]
# Both sides of a chunk, of the tokens at a time, and of the width of the filter; nothing.
LENGTHS = (1, 0, 66)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted(MODULES), poisoned_memory():
        yield


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def compare(
    run: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor], num_terms: int
) -> Tensors:
    """`run(kernels, *leaves)` of ours, torch's, and torch's in fp64; ours."""

    def results(kernels: Any, tensors: Sequence[Tensor]) -> Tensors:
        outputs = run(kernels, *tensors)
        return (*(x.detach() for x in outputs), *gradients(outputs, tensors))

    ours, plain = (results(way, leaves) for way in (TRITON, TORCH))
    # The interpreter cuts to bf16 where a GPU rounds, which is two roundings for one.
    assert_each_as_accurate(ours, plain, results(TORCH, in_double(leaves)), 2 + num_terms)
    return ours


@pytest.mark.parametrize(
    ("width", "has_bias", "has_halo", "dtype"),
    [
        (4, True, True, torch.bfloat16),
        (4, False, False, torch.float32),
        (1, True, False, torch.float32),
        pytest.param(4, True, True, torch.float32, marks=pytest.mark.soak),
        pytest.param(4, False, False, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param(1, True, False, torch.bfloat16, marks=pytest.mark.soak),
    ],
)
def test_convolution_and_norms_of_queries_and_keys(
    width: int, has_bias: bool, has_halo: bool, dtype: torch.dtype
) -> None:
    sections = ((1, 6), (1, 6), (2, 5))
    channels, cu = sum(heads * size for heads, size in sections), offsets(LENGTHS)
    shapes = [(sum(LENGTHS), channels), (channels, width)]
    shapes += [(channels,)] if has_bias else []
    shapes += [(len(LENGTHS), width - 1, channels)] if has_halo else []

    def run(kernels: Any, x: Tensor, weight: Tensor, *others: Tensor) -> Tensors:
        found: Tensors = kernels.convolve_sections(
            x,
            weight,
            sections,
            cu_seqlens=cu,
            bias_D=others[0] if has_bias else None,
            initial_halo=others[-1] if has_halo else None,
            normalise=True,
        )
        return found

    ours = compare(run, drawn(*shapes, dtype=dtype), 12)
    assert [x.dtype for x in ours[:3]] == [torch.float32, torch.float32, dtype]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_random_convolutions_against_filters_token_by_token(seed: int) -> None:
    """Filters longer than sequences, cuts at borders of chunks, odd channels, any strides."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(60 if seed else 2):
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.float16])
        width, channels = chance.choice([1, 2, 3, 4, 7]), chance.choice([1, 3, 6, 13])
        lengths = [chance.choice([0, 1, 2, width, 63, 64, 65]) for _ in range(chance.randint(1, 3))]
        lengths.append(chance.choice([1, 5]))
        num_tokens, cu = sum(lengths), offsets(lengths)
        shapes: list[tuple[int, ...]] = [(num_tokens, channels), (channels, width), (channels,)]
        shapes.append((len(lengths), width - 1, channels))
        leaves = [torch.randn(x, generator=generator).to(dtype) for x in shapes]
        if chance.random() < 0.5:
            # What reads them as if they lay side by side finds NaN.
            leaves = [torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] for x in leaves]
        exact = in_double(leaves)
        leaves = [x.requires_grad_() for x in leaves]
        plain = [x.detach().clone().requires_grad_() for x in leaves]

        def filtered(
            x: Tensor, weight: Tensor, bias: Tensor, halo: Tensor, cu: tuple[int, ...] = cu
        ) -> Tensor:
            rows = [x.new_zeros(0, x.shape[1])]
            for before, (start, stop) in zip(halo, pairwise(cu), strict=True):
                window = torch.cat([before, x[start:stop]])
                taps = weight.shape[1]
                found = [(window[t : t + taps] * weight.T).sum(0) for t in range(stop - start)]
                rows += [(one + bias)[None] for one in found]
            return torch.nn.functional.silu(torch.cat(rows))

        def convolved(
            kernels: Any, tensors: list[Tensor], cu: tuple[int, ...] = cu
        ) -> Sequence[Tensor]:
            x, weight, bias, halo = tensors
            sections = ((1, len(weight)),)
            options = {"cu_seqlens": cu, "bias_D": bias, "initial_halo": halo}
            (found,) = kernels.convolve_sections(x, weight, sections, **options)
            return (found.flatten(1),)

        results = []
        for outputs, tensors in (
            (convolved(TRITON, leaves), leaves),
            (convolved(TORCH, plain), plain),
            ((filtered(*exact),), exact),
        ):
            results.append((outputs[0].detach(), *gradients(outputs, tensors)))
        assert_each_as_accurate(*results, 2 + max(lengths))


# More channels than a block, of a wide tensor; more chunks than programs with sums of their own.
def test_many_channels_and_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from pcomm.gdn_cp.ops.kernels import triton_convolution

    def run(kernels: Any, x: Tensor, weight: Tensor) -> Tensors:
        found: Tensors = kernels.convolve_sections(
            x[:, 3:-1], weight, ((1, 129), (1, 128)), cu_seqlens=(0, 4, 5, 9)
        )
        return found

    for most in (64, 2):
        monkeypatch.setattr(triton_convolution, "_MOST_PARTS", most)
        compare(run, drawn((9, 261), (257, 2)), 100)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    x, weight = drawn((12, 4), (4, 4))
    changed = x.detach().clone()
    changed[:5], changed[10:] = torch.nan, torch.inf
    changed.requires_grad_()
    outputs = [
        TRITON.convolve_sections(y, weight, ((1, 4),), cu_seqlens=(0, 5, 10, 12))[0]
        for y in (x, changed)
    ]
    assert_equal(outputs[1][5:10], outputs[0][5:10])
    found = [gradients([o[5:10]], [y]) for o, y in zip(outputs, (x, changed), strict=True)]
    assert_equal(found[1][0][5:10], found[0][0][5:10])


@DTYPES
@pytest.mark.parametrize("heads", [3, 4])
def test_gates(dtype: torch.dtype, heads: int) -> None:
    a, *others = drawn((700, heads), (700, heads), (heads,), (heads,), dtype=dtype)
    # From where a softplus is an exponential to where it is its argument.
    a = (12 * a.detach()).requires_grad_()

    def run(kernels: Any, *tensors: Tensor) -> Tensors:
        found: Tensors = kernels.delta_gates(*tensors)
        return found

    compare(run, (a, *others), 700)


def test_time_steps_far_below_one_keep_their_digits() -> None:
    from pcomm.gdn_cp.ops.kernels.triton_gates import time_steps_and_decays

    dt = torch.linspace(-80, 30, 64)[:, None]
    log, bias = torch.tensor([0.5]), torch.tensor([-2.0])
    g, time = time_steps_and_decays(dt, log, bias)
    exact = torch.nn.functional.softplus(dt.double() + bias.double(), threshold=800)
    # An exponential of the argument, whose rounding it multiplies, and four operations.
    allowed = torch.finfo(torch.float32).eps * (4 + dt.abs().double())
    assert ((time - exact).abs() <= allowed * exact).all()
    assert ((g + exact * log.double().exp()).abs() <= 2 * allowed * -g).all()


@DTYPES
@pytest.mark.parametrize("width", [8, 24])
def test_norm_before_the_gate(dtype: torch.dtype, width: int) -> None:
    x, gate, weight = drawn((30, 3, width), (30, 5, width), (width,), dtype=dtype)

    def run(kernels: Any, x: Tensor, gate: Tensor, weight: Tensor) -> Tensors:
        # The gate of a head lies among other projections.
        return (kernels.rms_norm_then_gate(x, gate[:, 1:4], weight, eps=1e-5),)

    compare(run, (x, gate, weight), 90)
    rows = (y.detach()[0, 1] for y in (x, gate))
    assert TRITON.rms_norm_then_gate(*rows, weight).shape == (width,)


# A tile has many rows, one, and less than one row of the widest.
@DTYPES
@pytest.mark.parametrize(("num_groups", "width"), [(1, 24), (4, 24), (1, 2049)])
def test_gate_before_the_norm(dtype: torch.dtype, num_groups: int, width: int) -> None:
    leaves = drawn((5, width), (5, width), (width,), dtype=dtype)

    def run(kernels: Any, *tensors: Tensor) -> Tensors:
        return (kernels.gate_then_rms_norm(*tensors, num_groups=num_groups, eps=1e-5),)

    compare(run, leaves, width)


def test_programs_take_tiles_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from pcomm.gdn_cp.ops.kernels import triton_gates

    monkeypatch.setattr(triton_gates, "_MOST_PARTS", 2)
    monkeypatch.setattr(triton_gates, "_TILE", 16)
    monkeypatch.setattr(triton_gates, "_SUM_ROWS", 1)
    compare(lambda way, *x: way.delta_gates(*x), drawn((40, 4), (40, 4), (4,), (4,)), 40)
    norm = drawn((9, 8), (9, 8), (8,))
    compare(lambda way, *x: (way.gate_then_rms_norm(*x),), norm, 9)


def test_parameters_need_not_lie_side_by_side() -> None:
    """One number for all heads, and columns of a table that has none between them."""

    def table(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]

    def gates(kernels: Any, a: Tensor, b: Tensor, log: Tensor, bias: Tensor) -> Tensors:
        found: Tensors = kernels.delta_gates(a, b, table(log), bias.expand(4))
        return found

    compare(gates, drawn((9, 4), (9, 4), (4,), (1,)), 40)

    def space(kernels: Any, x: Tensor, log: Tensor, skip: Tensor) -> Tensors:
        keys = x.narrow(2, 0, 2)
        return tuple(
            kernels.chunk_mamba2_ssd(
                *(x, x[..., 2], log.expand(2), keys, keys),
                d_H=skip.expand(2),
                dt_bias_H=table(x[0, :, 0].detach()),
                cu_seqlens=(0, 5),
            )
        )

    compare(space, drawn((5, 2, 3), (1,), (1,)), 40)

    def norms(kernels: Any, x: Tensor, weight: Tensor) -> Tensors:
        weight = table(weight)
        normed = kernels.rms_norm_then_gate(x, x, weight)
        return normed, kernels.gate_then_rms_norm(x, x, weight, num_groups=2)

    compare(norms, drawn((3, 6), (6,)), 12)

    def convolution(kernels: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
        found: Tensors = kernels.convolve_sections(
            x, weight, ((1, 4),), cu_seqlens=(0, 9), bias_D=table(bias)
        )
        return found

    compare(convolution, drawn((9, 4), (4, 2), (4,)), 12)


# The second dimension of a grid ends at 65,535.
# The numbers of a grid of 1024 rows, a program each, are looked at in the long form.
@pytest.mark.parametrize(
    ("size", "is_run"),
    [
        (1024, False),
        (1025, True),
        (70_000, False),
        pytest.param(1024, True, marks=pytest.mark.soak),
    ],
)
def test_many_rows_of_a_batch_fit_in_a_launch(size: int, is_run: bool) -> None:
    x, weight = torch.ones(1, size, 2), torch.ones(2)
    with recorded() as launches:
        TRITON.rms_norm_then_gate(x, x, weight)
    assert [launch.grid[1] for launch in launches] == [1024 if size == 1024 else 1]
    if is_run:
        expected = TORCH.rms_norm_then_gate(x, x, weight)
        assert torch.allclose(TRITON.rms_norm_then_gate(x, x, weight), expected)


def test_a_halo_of_no_tokens_gets_no_gradient() -> None:
    """A tensor without numbers has no address that a launch could be given."""
    x, weight = drawn((3, 2), (2, 1))
    halo = torch.zeros(1, 0, 2, requires_grad=True)
    with recorded() as launches:
        (found,) = TRITON.convolve_sections(
            x, weight, ((1, 2),), cu_seqlens=(0, 3), initial_halo=halo
        )
        (grad,) = torch.autograd.grad(found.sum(), halo)
    assert grad.shape == halo.shape
    assert launches[1].arguments["grad_halo"] is None


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(8, 4), torch.zeros(4, 4)
    with pytest.raises(LayoutError, match="x: 8 tokens, and cu_seqlens ends at 7"):
        TRITON.convolve_sections(x, weight, ((1, 4),), cu_seqlens=(0, 7))
    halo = torch.zeros(1, 2, 4)
    with pytest.raises(ConfigError, match="initial_halo"):
        TRITON.convolve_sections(x, weight, ((1, 4),), cu_seqlens=(0, 8), initial_halo=halo)
    with pytest.raises(ConfigError, match="num_groups=3: 4 features"):
        TRITON.gate_then_rms_norm(x, x, x[0], num_groups=3)


def test_second_derivatives_are_refused() -> None:
    a, b, log, bias = drawn((4, 2), (4, 2), (2,), (2,))
    weight = torch.ones(2)
    for output in (
        TRITON.delta_gates(a, b, log, bias)[0],
        TRITON.rms_norm_then_gate(a, b, weight),
        TRITON.convolve_sections(a, torch.ones(2, 2), ((1, 2),), cu_seqlens=(0, 4))[0],
    ):
        # Also where the loss is linear, so that what arrives is a constant.
        for loss in (output.square().sum(), output.sum()):
            with pytest.raises(UnsupportedError, match="create_graph=True"):
                torch.autograd.grad(loss, a, create_graph=True, retain_graph=True)
