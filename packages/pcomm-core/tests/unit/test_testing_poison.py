"""Poisoned memory: fresh tensors are visibly not results, and nothing stays switched on."""

from __future__ import annotations

import functools

import pytest
import torch

from pcomm.core.testing.assertions import poisoned_memory


def flags() -> tuple[int, bool]:
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory
    return torch.get_deterministic_debug_mode(), fills


def test_fresh_memory_is_nan_or_the_largest_integer() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.zeros(5, dtype=dtype)
        with poisoned_memory():
            for fresh in (
                torch.empty(3, 4, dtype=dtype),
                torch.empty_like(x),
                x.new_empty(7),
                torch.empty_strided((2, 3), (3, 1), dtype=dtype),
                torch.empty(2, dtype=dtype).resize_(9),
            ):
                assert fresh.numel() > 0
                assert fresh.isnan().all()
            assert torch.zeros(4).tolist() == [0.0] * 4
            assert torch.cat([torch.ones(2), torch.ones(3)]).tolist() == [1.0] * 5
    with poisoned_memory():
        for dtype in (torch.int64, torch.int32, torch.uint8):
            assert (torch.empty(6, dtype=dtype) == torch.iinfo(dtype).max).all()


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("fills", [False, True])
def test_the_flags_are_as_before(mode: int, fills: bool, request: pytest.FixtureRequest) -> None:
    def set_flags(mode: int, fills: bool) -> None:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills

    request.addfinalizer(functools.partial(set_flags, *flags()))
    set_flags(mode, fills)
    with poisoned_memory():
        assert flags() == (1, True)
    assert flags() == (mode, fills)
    with pytest.raises(ZeroDivisionError), poisoned_memory():
        raise ZeroDivisionError
    assert flags() == (mode, fills)
