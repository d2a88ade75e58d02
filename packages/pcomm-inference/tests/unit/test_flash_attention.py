"""Where torch's attention of packed sequences is found, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import pcomm.inference.layers.flash_attention as flash_attention
from pcomm.inference.layers import varlen_call

varlen = pytest.importorskip("torch.nn.attention.varlen")
GPU, HEADS = torch.device("cuda"), (torch.bfloat16, 128)


@pytest.fixture(autouse=True)
def looked_for_again() -> Iterator[None]:
    flash_attention._found.cache_clear()
    yield
    flash_attention._found.cache_clear()


def two_heads(query: Any, key: Any, value: Any, cu_seq_q: Any, is_causal: bool = False) -> None:
    """As torch 2.10 had it."""


@pytest.mark.parametrize("name", ["varlen_attn", "varlen_attn_out"])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_where_one_call_is_there(name: Any, capability: tuple[int, int]) -> None:
    """Once it was looked for, it is not looked for again."""
    torchs = getattr(varlen, name, None)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability) as asked:
        for _ in range(2):
            assert varlen_call(name, torch.device("cpu"), *HEADS) is None
            expected = None if capability < (8, 0) else torchs
            assert varlen_call(name, GPU, *HEADS) is expected
    assert asked.call_count == 1


@pytest.mark.parametrize("name", ["varlen_attn", "varlen_attn_out"])
def test_an_older_torch_has_none(name: Any) -> None:
    own = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
    with own, mock.patch.object(varlen, name, two_heads, create=True):
        assert varlen_call(name, GPU, *HEADS) is None
    flash_attention._found.cache_clear()
    with own, mock.patch.dict("sys.modules", {"torch.nn.attention.varlen": None}):
        assert varlen_call(name, GPU, *HEADS) is None
    flash_attention._found.cache_clear()
    with own, mock.patch.object(varlen, name, None, create=True):
        assert varlen_call(name, GPU, *HEADS) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_heads_that_it_takes(dtype: torch.dtype) -> None:
    widths = (0, 4, 8, 12, 64, 128, 250, 256, 264)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        taken = [width for width in widths if varlen_call("varlen_attn", GPU, dtype, width)]
    assert taken == ([8, 64, 128, 256] if dtype.itemsize == 2 else [])
