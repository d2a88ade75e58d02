"""Sums of squares beside the same sums in fp64."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.tensor_parallel.optimizers import _PIECE, sum_of_squares

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0, 1, _PIECE - 1, _PIECE, _PIECE + 1, 3 * _PIECE, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_does_not_lose_what_is_small_beside_the_sum(size: int, dtype: torch.dtype) -> None:
    values = 1e-3 * torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = float(values.double().square().sum())
    # Each piece is a norm in fp32. Added up as one, 2**22 elements are off by 1e-4.
    assert float(sum_of_squares([values], CPU)) == pytest.approx(exact, rel=1e-6)


def test_it_adds_tensors_of_every_layout_and_none() -> None:
    wide = torch.ones(3 * _PIECE, 2)
    assert not wide.T[:, ::2].is_contiguous()
    found = sum_of_squares([wide.T[:, ::2], torch.tensor(2.0), torch.empty(0)], CPU)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(3 * _PIECE + 4, rel=1e-6)
    assert float(sum_of_squares([], CPU)) == 0.0
