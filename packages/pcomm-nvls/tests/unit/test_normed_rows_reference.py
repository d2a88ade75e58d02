"""The norm and the 8-bit floats of the reference against those of torch, and threads of a row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pcomm.nvls.collectives.fused_rmsnorm import RowThreads, row_threads
from pcomm.nvls.references import fp8_rows, rms_norm

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def off_by_digits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many of the numbers of their type lie between two of the same sign."""
    kind = torch.int32 if a.dtype is torch.float32 else torch.int16
    assert torch.equal(a.sign(), b.sign())
    return (a.view(kind).long() - b.view(kind).long()).abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 200, 2880])
def test_the_norm_is_torch_s_but_for_the_last_digit_of_fp32(dtype, hidden):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, hidden, generator=generator).to(dtype)
    weight = torch.randn(hidden, generator=generator).to(dtype)
    off = off_by_digits(rms_norm(x, weight, 1e-5), F.rms_norm(x, (hidden,), weight, 1e-5))
    # In fp32: mean, root, reciprocal and two products; the order of the sum adds a few.
    assert off.max() <= (16 if dtype is torch.float32 else 1)
    if dtype is not torch.float32:
        assert (off == 0).double().mean() > 0.999


def test_a_row_of_8_bit_floats_uses_their_whole_range() -> None:
    x = torch.tensor([[0.875, -1.75, 0.4375, 0.0], [0.0, 0.0, 0.0, 0.0], [896.0, 1.0, 2.0, 3.0]])
    rows, scales = fp8_rows(x)
    assert scales.tolist() == [2.0**-8, 2.0**-64, 2.0]
    assert rows.float().tolist() == [[224.0, -448.0, 112.0, 0.0], [0.0] * 4, [448.0, 0.5, 1.0, 1.5]]


def test_a_given_scale_cuts_large_numbers_off() -> None:
    x = torch.tensor([[1.0, -2.0, 1000.0, -(2.0**-10), 0.068]])
    rows, scale = fp8_rows(x, torch.tensor([0.5]))
    assert scale.tolist() == [0.5]
    # The smallest number is 2^-9; between 0.125 and 0.25 they are 2^-6 apart.
    assert rows.float().tolist() == [[2.0, -4.0, 448.0, -(2.0**-9), 0.140625]]


def test_a_row_has_threads_for_all_ranks_and_few_vectors_for_each() -> None:
    assert row_threads(1024, 2) == RowThreads(128, 4)
    assert row_threads(1032, 2) == RowThreads(256, 8)
    assert row_threads(1024, 2, halves=True) == RowThreads(256, 4)
    assert row_threads(4096, 2, halves=True) == RowThreads(512, 8)
    assert row_threads(4112, 2) == RowThreads(1024, 16)
    assert row_threads(8200, 2) == RowThreads(2048, 16)
    assert row_threads(16384, 4) == RowThreads(4096, 16)
    assert [row_threads(n, 2).max_registers for n in (1024, 16384)] == [128, 128]  # type: ignore[union-attr]
    assert RowThreads(2048, 32).max_registers == 64
    assert row_threads(16385, 4) is None
    assert row_threads(0, 2) is None
