"""Comparisons whose tolerance is derived, not chosen.

Rounding once costs at most u = eps / 2 relative. A sum of n terms, in any order, is off by at
most n u times the sum of the magnitudes (first order; Higham, Accuracy and Stability of
Numerical Algorithms, section 4.2). Where a bound is too coarse, the yardstick is the error that
plain torch makes in the same dtype on the same input.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_as_accurate", "assert_close", "assert_equal"]


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits; NaN equals NaN. For everything that only moves data."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_close(
    actual: Tensor, expected: Tensor, *, num_terms: int, magnitude: float | None = None
) -> None:
    """Equal up to the rounding of sums of `num_terms` products in the dtype of `actual`.

    Args:
        actual: The tensor under test.
        expected: The reference, in the same or a wider dtype.
        num_terms: Length of the longest chain of additions behind one element, in both results
            together; a matrix product of inner size K has K.
        magnitude: Largest sum of absolute values behind one element; by default the largest
            element of `expected`, times the square root of `num_terms`, which is what such a
            sum has for terms of random sign.
    """
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    assert torch.isfinite(actual).all(), "the result holds values that are not finite"
    # An infinite reference would make the bound infinite too, and let everything pass.
    assert torch.isfinite(expected).all(), "the reference holds values that are not finite"
    if not expected.numel():
        return
    unit = torch.finfo(actual.dtype).eps / 2
    reference = expected.double()
    if magnitude is None:
        magnitude = float(reference.abs().max()) * num_terms**0.5
    bound = (num_terms + 1) * unit * magnitude
    worst = float((actual.double() - reference).abs().max())
    assert worst <= bound, (
        f"worst element is off by {worst:.3e}; {num_terms} terms of total magnitude "
        f"{magnitude:.3e} in {actual.dtype} explain {bound:.3e}"
    )


def assert_as_accurate(
    actual: Tensor, plain: Tensor, exact: Tensor, *, factor: float = 2.0, num_terms: int = 1
) -> None:
    """At most `factor` times as far from `exact` as plain torch is, in norm and worst element.

    Args:
        actual: The tensor under test.
        plain: The same computation by plain torch in the same dtype.
        exact: The same computation in float64.
        factor: Largest allowed ratio of the two errors.
        num_terms: Roundings granted in any case, for when plain torch is exact by luck.
    """
    assert actual.shape == exact.shape, f"shapes {actual.shape} and {exact.shape}"
    assert torch.isfinite(exact).all(), "the reference holds values that are not finite"
    assert plain.shape == exact.shape, f"plain torch has shape {plain.shape}, not {exact.shape}"
    assert actual.dtype == plain.dtype, f"{actual.dtype}, plain torch has {plain.dtype}"
    reference = exact.double()
    floor = num_terms * torch.finfo(actual.dtype).eps / 2
    for name, measure in (("norm", torch.Tensor.norm), ("worst element", _largest)):
        ours = float(measure(actual.double() - reference))
        theirs = float(measure(plain.double() - reference))
        allowed = factor * theirs + floor * float(measure(reference))
        assert ours <= allowed, f"{name} of the error is {ours:.3e}, plain torch's {theirs:.3e}"


def _largest(x: Tensor) -> Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())
