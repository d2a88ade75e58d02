"""The one call that compares tensors with those of before: of what it is true, and never true."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pcomm.nvls.workspace.launch import guard_of

X = torch.zeros(4, 8)
OTHERS = {
    "shape": torch.zeros(8, 4),
    "rows": torch.zeros(5, 8),
    "dimensions": torch.zeros(32),
    "strides": torch.zeros(8, 4).t(),
    "dtype": torch.zeros(4, 8, dtype=torch.int32),
    "device": torch.zeros(4, 8, device="meta"),
    "gradient": torch.zeros(4, 8, requires_grad=True),
    "sign": torch._neg_view(torch.zeros(4, 8)),
    "layout": torch.zeros(4, 8).to_sparse(),
}


def test_like_tensors_are_alike() -> None:
    is_like, are_like = guard_of(X), guard_of(X, X.clone())
    with torch.no_grad():
        assert is_like(torch.ones(4, 8))
        assert are_like(torch.ones(9, 8)[3:7], torch.ones(4, 8))
    # Another place in memory, and a larger tensor around it.
    assert is_like(torch.ones(9, 8)[3:7])
    # Asked of the same tensor twice it says nothing.
    assert not are_like(X, X)


@pytest.mark.parametrize("what", OTHERS)
def test_tensors_that_differ_are_not(what: str) -> None:
    other, modes = OTHERS[what], [torch.enable_grad]
    if what != "gradient":  # which is none in the other modes
        modes += [torch.no_grad, torch.inference_mode]
    for mode in modes:
        with mode():
            assert not guard_of(X)(other)
            assert not guard_of(X, X.clone())(X, other)
            assert not guard_of(X, X.clone())(other, X)


def test_a_tensor_that_records_gradients_has_no_guard() -> None:
    """Or it might be taken for one of no_grad mode, where it is no error."""
    x = torch.zeros(4, 8, requires_grad=True)
    with torch.no_grad():
        is_like = guard_of(x)
        assert not is_like(x)
    assert not is_like(x)


def test_without_the_class_of_torch_nothing_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def __init__(self, *tensors: Tensor, **_: object) -> None:
            raise TypeError("other arguments")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Refuses)
    assert not guard_of(X)(X)
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert not guard_of(X)(X)
