"""Cases of changed scores, and dense softmax of one request by the formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inference_support.paged_tokens import Pool, Tokens
from pcomm.core.testing.assertions import assert_as_accurate, assert_close

__all__ = ["CASES", "LENGTHS", "SINKS", "G", "H", "assert_right", "dense", "made"]

H, G = 6, 2
SINKS = torch.tensor([-3.0, 0.0, 1.0, 4.0, 9.0, -torch.inf], dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.25, 0.0, 2.0, 0.01, -0.02], dtype=torch.float64)
# With blocks of 16: shorter than one, one, longer than a call of a chunk (85 tokens), as long as
# the longest text and longer. Each of the others alone, and together.
CASES: dict[str, dict[str, Any]] = {
    **{f"window {size}": {"window": size} for size in (1, 5, 16, 17, 100, 256, 300, 999)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks_H": SINKS},
    "slopes": {"alibi_H": SLOPES},
    "narrow values": {"value_dim": 8},
    "wide values": {"value_dim": 24, "window": 20},
    "all": {
        "window": 33,
        "softcap": 3.0,
        "sinks_H": SINKS,
        "alibi_H": SLOPES,
        "value_dim": 8,
        "scale": 0.4,
    },
}
LENGTHS = (1, 2, 16, 33, 100, 300)


def dense(
    tokens: Tokens,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    alibi_H: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`[T, H, V]`: the formula, written out."""
    q, k, v = (x.to(dtype) for x in (tokens.q, tokens.k, tokens.v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihk,jhk->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(q))
    if alibi_H is not None:
        scores = scores + alibi_H.to(dtype)[:, None, None] * (j - i)
    is_seen = (j <= i) if window is None else (j <= i) & (j > i - window)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], 2)
    return torch.einsum("hij,jhv->ihv", scores.softmax(2)[:, :, : len(q)], v)


def assert_right(found: Tensor, tokens: Tokens, options: dict[str, Any]) -> None:
    exact = dense(tokens, torch.float64, **options)[-len(found) :]
    if found.dtype == torch.float64:
        assert_close(found, exact, num_terms=2 * 16 + len(tokens.q), magnitude=16.0)
    elif found.dtype == torch.float32:
        plain = dense(tokens, torch.float32, **options)[-len(found) :]
        assert_as_accurate(found, plain, exact, num_terms=8)
    else:
        # Weights may be rounded to bf16 once, and so is the result; sums are in fp32.
        assert_close(
            found, exact.to(found.dtype), num_terms=2, magnitude=float(tokens.v.abs().max())
        )


def made(
    options: dict[str, Any], dtype: torch.dtype, block_size: int, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Pool, list[Tokens], dict[str, Any]]:
    options = dict(options)
    value_dim = options.pop("value_dim", None)
    pool = Pool((H, G), dtype, block_size, 2048, value_dim=value_dim)
    requests = [
        Tokens(length, (H, G), dtype, seed, value_dim=value_dim)
        for seed, length in enumerate(lengths)
    ]
    return pool, requests, options
