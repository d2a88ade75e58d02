"""Comparisons: they pass what rounding explains and fail what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcomm.core.testing.assertions import assert_as_accurate, assert_close, assert_equal

INNER = 300
DTYPES = [torch.float32, torch.bfloat16]


def product(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix product in `dtype`, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(17, INNER, generator=generator).to(dtype)
    b = torch.randn(INNER, 13, generator=generator).to(dtype)
    return a @ b, a.double() @ b.double()


def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of a few terms: by eight partial sums, plainly, and in float64."""
    x = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = x.view(64, 10, 5).sum(2).sum(1)
    return ours, x.sum(1), x.double().sum(1)


def explained(expected: Tensor, dtype: torch.dtype) -> float:
    """The bound of `assert_close`, written out again."""
    half_step = torch.finfo(dtype).eps / 2
    return float(expected.abs().max()) * INNER**0.5 * (INNER + 1) * half_step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_close_passes_what_rounding_explains(dtype: torch.dtype, seed: int) -> None:
    actual, expected = product(dtype, seed)
    assert not torch.equal(actual.double(), expected)
    assert_close(actual, expected, num_terms=INNER)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "one element"])
def test_close_fails_an_error_of_four_times_the_bound(dtype: torch.dtype, everywhere: bool) -> None:
    _, expected = product(dtype)
    wrong = expected.clone()
    error = 4 * explained(expected, dtype)
    # In float64, so that the error is exactly what it says.
    if everywhere:
        wrong += error
    else:
        wrong[3, 5] += error
    with pytest.raises(AssertionError, match="300 terms of total magnitude"):
        assert_close_as(dtype, wrong, expected)
    assert_close_as(dtype, expected + error / 8, expected)


def assert_close_as(dtype: torch.dtype, actual: Tensor, expected: Tensor) -> None:
    """`assert_close` with values that `dtype` could not hold, and its rounding."""
    scale = torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
    magnitude = float(expected.abs().max()) * INNER**0.5
    assert_close(actual, expected, num_terms=INNER, magnitude=magnitude * scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_close_and_as_accurate_fail_what_is_not_finite(value: float) -> None:
    actual, expected = product(torch.float32)
    broken = actual.clone()
    broken[0, 0] = value
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(broken, expected, num_terms=INNER)
    with pytest.raises(AssertionError):
        assert_as_accurate(broken, actual, expected)
    with pytest.raises(AssertionError, match="reference holds values"):
        assert_close(actual, broken.double(), num_terms=INNER)
    with pytest.raises(AssertionError, match="reference holds values"):
        assert_as_accurate(actual, actual, broken.double())


def test_close_and_as_accurate_fail_another_shape() -> None:
    actual, expected = product(torch.float32)
    for wrong in (actual[:1], actual[:, :1], actual.t(), actual.flatten()):
        with pytest.raises(AssertionError, match="shapes"):
            assert_close(wrong, expected, num_terms=INNER)
        with pytest.raises(AssertionError, match="shapes"):
            assert_as_accurate(wrong, actual, expected)
        with pytest.raises(AssertionError, match="plain torch has shape"):
            assert_as_accurate(actual, wrong, expected)
    with pytest.raises(AssertionError, match=r"torch\.bfloat16, plain torch has torch\.float32"):
        assert_as_accurate(actual.bfloat16(), actual, expected)
    empty = torch.empty(0, 3)
    assert_close(empty, empty.double(), num_terms=1)
    assert_as_accurate(empty, empty, empty.double())
    assert_equal(empty, empty.clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_accurate_passes_another_order_of_additions(dtype: torch.dtype) -> None:
    ours, plain, exact = sums(dtype)
    assert not torch.equal(ours, plain)
    assert_as_accurate(ours, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_accurate_fails_a_larger_error(dtype: torch.dtype) -> None:
    ours, plain, exact = sums(dtype)
    worst = float((plain.double() - exact).abs().max())
    rounding = float(exact.abs().max()) * torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match="norm of the error is"):
        assert_as_accurate(ours + 4 * worst, plain, exact)
    one_wrong = ours.clone()
    one_wrong[7] += 4 * (worst + rounding)
    with pytest.raises(AssertionError, match="of the error is"):
        assert_as_accurate(one_wrong, plain, exact)


def test_as_accurate_measures_the_worst_element_too() -> None:
    """One wrong element among very many hides in the norm."""
    exact = torch.ones(100_000, dtype=torch.float64)
    plain = (exact + 1e-3).float()
    ours = plain.clone()
    ours[5] += 0.01
    with pytest.raises(AssertionError, match="worst element of the error"):
        assert_as_accurate(ours, plain, exact)


def test_as_accurate_measures_the_norm_too() -> None:
    """Many elements as wrong as plain torch's worst one are within the worst element."""
    exact = torch.ones(10_000, dtype=torch.float64)
    plain = exact.float()
    plain[5] += 0.01
    with pytest.raises(AssertionError, match="norm of the error"):
        assert_as_accurate((exact + 0.01).float(), plain, exact)


def test_as_accurate_grants_roundings_where_plain_torch_is_exact() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    plain = exact.float()
    one_off = plain + torch.finfo(torch.float32).eps
    with pytest.raises(AssertionError):
        assert_as_accurate(one_off, plain, exact)
    assert_as_accurate(one_off, plain, exact, num_terms=2)
    assert_as_accurate(one_off + 1e-6, plain + 1e-6, exact, factor=2.0)


def test_equal_is_about_every_bit() -> None:
    x = torch.tensor([1.0, float("nan"), -2.0])
    assert_equal(x, x.clone())
    for other in (
        torch.tensor([1.0 + torch.finfo(torch.float32).eps, float("nan"), -2.0]),
        torch.tensor([1.0, 0.0, -2.0]),
        x.double(),
        x[:2],
        x.view(3, 1),
    ):
        with pytest.raises(AssertionError):
            assert_equal(x, other)
