"""What results of distributed collectives are: same dtype, no gradient, and no word from torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, ranks

OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


def operation(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(default_collectives(), name)
    return found


@pytest.mark.parametrize("name", OPERATIONS)
@ranks(2)
def test_small_integers_are_not_widened(rank: int, name: str) -> None:
    for dtype in (torch.int32, torch.uint8):
        assert operation(name)(torch.ones(4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("name", OPERATIONS)
@ranks(2)
def test_results_carry_no_gradient(rank: int, name: str) -> None:
    x = torch.ones(4, requires_grad=True)
    result = operation(name)(x)
    out = torch.empty_like(result)
    assert not result.requires_grad
    assert operation(name)(x, out=out) is out
    assert not out.requires_grad
    assert_equal(out, result)


@pytest.mark.parametrize("name", OPERATIONS)
@ranks(2)
def test_torch_has_nothing_to_warn_of(rank: int, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operation(name)(torch.ones(4))
