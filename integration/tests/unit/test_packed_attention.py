"""Attention of packs: one call where a GPU and torch have it, else one for each length; no GPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

import pcomm.inference.layers.flash_attention as flash_attention
from pcomm.core.testing import assert_close
from pcomm.integration.models.attention import packed_attention

# One sequence is empty, two neighbours are as long.
OFFSETS = (0, 3, 3, 8, 13, 14)
SIGNATURE = inspect.signature(varlen.varlen_attn)


def example(dtype: torch.dtype, width: int = 16, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(OFFSETS[-1], n, width) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, offsets: list[int]) -> Tensor:
    """The formula in fp64, over all keys of the buffer at once."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    places = torch.arange(q.shape[1])
    owner = torch.bucketize(places, torch.tensor(offsets[1:]), right=True)
    seen = (owner[:, None] == owner) & (places[:, None] >= places)
    scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


class Kernel:
    """In the place of torch's: the formula, of what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        asked = SIGNATURE.bind(*given, **options).arguments
        self.calls.append(asked)
        q, k, v = (asked[name] for name in ("query", "key", "value"))
        return dense(q, k, v, asked["cu_seq_q"].tolist()).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_pack_of_several_lengths_is_one_call_with_the_values_of_many(
    dtype: torch.dtype, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, upstream = example(dtype, kv_heads=kv_heads), torch.ones(OFFSETS[-1], 4, 16)
    exact = dense(*inputs, list(OFFSETS))
    exact_gradients = torch.autograd.grad(exact, inputs, upstream.double())
    kernel = Kernel()
    for found in (None, kernel):
        monkeypatch.setattr(flash_attention, "_found", lambda name, _, found=found: found)
        mixed = packed_attention(*inputs, OFFSETS)
        gradients = torch.autograd.grad(mixed, inputs, upstream.to(dtype))
        # Rounded when it is stored, and within torch's own attention once for each factor.
        assert_close(mixed.detach(), exact.detach(), num_terms=4, magnitude=4.0)
        for one, other in zip(gradients, exact_gradients, strict=True):
            # A key is read by all queries behind it, of as many heads as share it.
            assert_close(one, other, num_terms=14 * 4, magnitude=4.0)
    (call,) = kernel.calls
    assert call["cu_seq_q"] is call["cu_seq_k"]
    assert (call["cu_seq_q"].tolist(), call["cu_seq_q"].dtype) == ([0, 3, 8, 13, 14], torch.int32)
    assert (call["max_q"], call["max_k"], call["window_size"]) == (5, 5, (-1, 0))
    assert call["enable_gqa"] is (kv_heads == 2)


@pytest.mark.parametrize(
    ("dtype", "width", "offsets", "calls"),
    [
        (torch.bfloat16, 256, OFFSETS, 1),
        (torch.bfloat16, 264, OFFSETS, 0),
        (torch.bfloat16, 12, OFFSETS, 0),
        (torch.float32, 16, OFFSETS, 0),
        # As many of one length are a batch, and nothing at all is no call.
        (torch.bfloat16, 16, (0, 7, 14), 0),
        (torch.bfloat16, 16, (0, 0), 0),
    ],
)
def test_what_the_kernel_does_not_take_is_computed_by_lengths(
    dtype: torch.dtype,
    width: int,
    offsets: tuple[int, ...],
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(flash_attention, "_found", lambda name, _: kernel)
    inputs = [x.detach()[: offsets[-1]] for x in example(dtype, width)]
    mixed = packed_attention(*inputs, offsets)
    assert mixed.shape == inputs[0].shape
    assert len(kernel.calls) == calls


def test_autocast_lowers_what_the_kernel_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(flash_attention, "_found", lambda name, _: kernel)
    q, k, v = example(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = packed_attention(q, k, v.bfloat16(), OFFSETS)
    asked = [kernel.calls[0][name].dtype for name in ("query", "key", "value")]
    assert {*asked, mixed.dtype} == {torch.bfloat16}


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten" and func.namespace != "prim":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_torchs_own_is_one_operation_forward_and_one_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "_found", lambda name, _: varlen.varlen_attn)
    inputs = [x.detach().to("meta").requires_grad_() for x in example(torch.bfloat16)]
    with Launches() as seen, torch.autograd.set_multithreading_enabled(False):
        mixed = packed_attention(*inputs, OFFSETS)
        gradients = torch.autograd.grad(mixed, inputs, torch.empty_like(mixed))
    assert seen.names == ["_varlen_attn", "_varlen_attn_backward"]
    assert [g.shape for g in gradients] == [x.shape for x in inputs]
