"""All chunks of a step in one call of torch's attention, which a dense one stands in for here.

That of torch runs on GPUs alone. What it is told is checked, and what comes out against the formula
in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pcomm.inference.layers.flash_attention as flash_attention
from inference_support.kernels import interpreted_kernels
from inference_support.paged_tokens import Pool, Tokens
from inference_support.score_cases import CASES, G, H, assert_right, made
from pcomm.inference.attention.on_device import attend_on_device
from pcomm.inference.attention.scores import Softmax
from pcomm.inference.model import KVMemory, StepBatch

BF16 = torch.bfloat16


class Dense:
    """What `varlen_attn_out` does on a GPU, and how many sequences each call has."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> None:
        assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert all(one.stride(2) == 1 for one in (out, query, key, value))
        news, seen = (list(pairwise(one.tolist())) for one in (cu_seq_q, cu_seq_k))
        assert (news[-1][1], seen[-1][1]) == (len(query), len(key)) == (len(out), len(value))
        assert max_q == max(b - a for a, b in news)
        assert max_k == max(b - a for a, b in seen)
        self.calls.append(len(news))
        left, right = window_size
        assert right == 0
        group = query.shape[1] // key.shape[1]
        for (a, b), (c, d) in zip(news, seen, strict=True):
            q = query[a:b].double().transpose(0, 1)
            k, v = (
                one[c:d].double().repeat_interleave(group, 1).transpose(0, 1)
                for one in (key, value)
            )
            scores = q @ k.transpose(1, 2) * (scale or q.shape[2] ** -0.5)
            behind = torch.arange(d - c) - torch.arange(b - a)[:, None] - (d - c - b + a)
            is_seen = behind <= 0 if left < 0 else (behind <= 0) & (behind >= -left)
            scores.masked_fill_(~is_seen, -torch.inf)
            out[a:b] = (scores.softmax(2) @ v).transpose(0, 1).to(out.dtype)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dense]:
    stand_in = Dense()
    monkeypatch.setattr(flash_attention, "_found", lambda name, device: stand_in)
    with interpreted_kernels():
        yield stand_in


# Of each step, the new tokens of the requests, those that decode first.
STEPS = [
    {0: 17, 1: 40, 2: 1},
    {0: 1, 1: 23, 3: 30},
    {0: 1, 2: 1, 3: 1},
    {0: 1, 2: 30, 3: 40},
]


@pytest.mark.parametrize("case", ["plain", "window 17", "scale"])
def test_chunks_of_a_step_are_one_call(dense: Dense, case: str) -> None:
    """Fresh ones, those behind others, and decodes before them; windows that are exceeded."""
    cases = {"plain": {}, "window 17": CASES["window 17"], "scale": {"scale": 0.1}}
    lengths = tuple(sum(new.get(i, 0) for new in STEPS) for i in range(4))
    pool, requests, options = made(cases[case], BF16, 16, lengths)
    found: list[list[Tensor]] = [[] for _ in lengths]
    for new in STEPS:
        rows = pool.step_on_device([(requests[i], n) for i, n in new.items()], **options)
        for i, own in zip(new, rows, strict=True):
            found[i].append(own)
    for one, own_rows in zip(requests, found, strict=True):
        assert_right(torch.cat(own_rows), one, options)
    # A prompt of one token is a chunk, and a step of decodes alone has none.
    assert dense.calls == [3, 2, 2]


def test_keys_are_seen_as_they_are_kept(dense: Dense) -> None:
    """Where memory has another dtype than the model."""
    one, pool = Tokens(9, (H, G), BF16, 0), Pool((H, G), torch.float16, 16)
    found = torch.cat([pool.step_on_device([(one, n)])[0] for n in (4, 5)])
    one.k, one.v = one.k.half().to(BF16), one.v.half().to(BF16)
    assert_right(found, one, {})
    assert dense.calls == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "options", "is_one_call"),
    [
        (BF16, 256, 256, {}, True),
        (torch.float16, 24, 24, {}, True),
        (BF16, 264, 264, {}, False),
        (BF16, 20, 20, {}, False),
        (BF16, 16, 24, {}, False),
        (torch.float32, 16, 16, {}, False),
        (BF16, 16, 16, {"softcap": 5.0}, False),
    ],
    ids=str,
)
def test_what_flash_attention_does_not_take_is_a_call_for_each_chunk(
    dense: Dense,
    dtype: torch.dtype,
    width: int,
    value_width: int,
    options: dict[str, Any],
    is_one_call: bool,
) -> None:
    pool = Pool((H, G), dtype, 16, 64, head_dim=width, value_dim=value_width)
    requests = [Tokens(5, (H, G), dtype, n, width, value_width) for n in range(2)]
    rows = pool.step_on_device([(one, 5) for one in requests], **options)
    for one, own in zip(requests, rows, strict=True):
        assert_right(own, one, options)
    assert dense.calls == [2] * is_one_call


def test_no_number_of_a_tensor_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without numbers raises when one is asked for: the host waits for nothing."""
    pool, requests, _ = made({}, BF16, 16, (20, 50))
    for one in requests:
        pool.step([(one, 10)])
    batch = pool.batch([(requests[0], 10), (requests[1], 40)])
    monkeypatch.setattr(flash_attention, "_found", lambda name, device: lambda *a, **named: None)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fields = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in vars(batch).items()
        }
        memory = KVMemory(*map(mode.from_tensor, (pool.memory.keys, pool.memory.values)))
        new = (torch.empty(50, heads, 16, dtype=BF16) for heads in (H, G, G))
        without = StepBatch(**fields)
        rows = attend_on_device(*new, memory, without, Softmax(), 12)
    assert rows.shape == (50, H, 16)
    # For the layers behind it.
    (keys,) = without.prepared.values()
    assert keys.slots_L.shape == (20 + 50,)


def test_torch_has_the_call_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are those that are given."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has none that writes to a given place")
    # All are taken, down to the operation that CPUs do not have.
    monkeypatch.setattr(flash_attention, "_found", lambda name, device: varlen.varlen_attn_out)
    one, pool = Tokens(9, (H, G), BF16, 0), Pool((H, G), BF16, 16)
    with torch.inference_mode(), pytest.raises(NotImplementedError, match="_flash_attention_forw"):
        pool.step_on_device([(one, 9)])
    given = signature(Dense.__call__).parameters
    taken = signature(varlen.varlen_attn_out).parameters
    assert [name for name in given if name != "self" and name not in taken] == []
    positional = [name for name, one in given.items() if one.kind == one.POSITIONAL_OR_KEYWORD]
    assert positional[1:] == list(taken)[:8]
