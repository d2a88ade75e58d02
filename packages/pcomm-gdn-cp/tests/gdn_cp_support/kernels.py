"""The kernels of this package in tests: interpreted, and what is compared with what."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.testing.assertions import assert_as_accurate
from pcomm.gdn_cp.ops.backend import Kernels

__all__ = ["MODULES", "TORCH", "TRITON", "assert_each_as_accurate", "in_double"]

# Each after those that it imports.
MODULES = [
    f"pcomm.gdn_cp.ops.kernels.{name}"
    for name in (
        "triton_pieces",
        "triton_chunks",
        "triton_chunks_backward",
        "triton_gates",
        "triton_convolution",
        "triton_recurrences",
    )
]
TORCH, TRITON = Kernels("torch", "for the test"), Kernels("triton", "for the test")


def in_double(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in fp64, as leaves that want their gradient."""
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_each_as_accurate(
    ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], num_terms: int
) -> None:
    """Each as far from fp64 as torch in the same dtype is, or as `num_terms` roundings explain."""
    for mine, theirs, wanted in zip(ours, plain, exact, strict=True):
        assert_as_accurate(mine, theirs, wanted, num_terms=num_terms)
