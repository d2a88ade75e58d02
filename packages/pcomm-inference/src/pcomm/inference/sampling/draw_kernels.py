"""One token for each row of logits in three launches on a GPU, whatever the settings of the rows.

Importing this file imports Triton. A program reads one part of one row. The first launch finds the
largest logit of each part. The second draws in each part of the rows that keep all tokens, or all
above a probability; of the others it adds up how many tokens there are, and which mass they have,
in each of many bins of logits. In the third, the bins say between which two logits the last token
of top-k or top-p lies: tokens above are drawn from, those between are listed, and the last program
of a row that arrives finds the place of the cut in the list, and the best token of all.

All sums are those of integers, so that a row gets its token in any batch and any order of programs.
`sampler` and `filters` say what is computed, and are the reference.
"""

# Shape suffixes: R rows, V vocabulary, P parts of a row, B bins.

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.kernel_arithmetic import DTYPES
from pcomm.inference.sampling.cut_kernels import (
    INFINITY,
    NO_ID,
    Bins,
    DrawSizes,
    Given,
    Listed,
    Row,
    better,
    between,
    bin_of,
    bins_of,
    key_of,
    score_of,
    units_of,
)
from pcomm.inference.sampling.noise import TokenNoise, row_keys
from pcomm.inference.sampling.params import SamplingRow

__all__ = ["choose", "launches", "takes_logits", "told_of_draws"]

# Ids of a part, of a turn of its loop, and listed tokens of a turn.
_PART, _TILE, _LISTED = 4096, 1024, 1024
# Bins of logits below the largest: so many of them, and so many for each unit of a logit. Behind
# the last lie tokens without a unit of mass.
_BINS, _BINS_PER_LOGIT = 1024, 46.0


def takes_logits(logits_RV: Tensor) -> bool:
    """Whether `choose` reads such logits."""
    return logits_RV.dtype in DTYPES and logits_RV.stride(1) == 1


def choose(logits_RV: Tensor, told_6R: Tensor, noise: TokenNoise) -> Tensor:
    """int64 `[R]`, the token of each row; -1 where the largest logit is not finite. Local.

    Args:
        logits_RV: Logits that `takes_logits`, edited and masked.
        told_6R: int64 `[6, R]` on the device, from `told_of_draws` of these rows.
        noise: Noise of the vocabulary.
    """
    out_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    for launch in launches(logits_RV, told_6R, noise.mixed_V, out_R):
        launch.run()
    return out_R


def told_of_draws(
    rows: Sequence[SamplingRow], divisors: Sequence[float], vocabulary: int
) -> Tensor:
    """What the kernels are told: int64 `[6, R]` on the host, numbers as bits of fp64. Local.

    The key of its noise, 1 where it draws, temperature, k or 0, `top_p`, and `min_p` as fp32.

    Args:
        rows: Settings of each row.
        divisors: Temperatures, within the range that fp32 divides by.
        vocabulary: Number of logits of a row.
    """
    params = [row.params for row in rows]
    keys = row_keys([one.seed for one in params], [row.position for row in rows], _HOST)
    is_drawn = [one.temperature > 0 for one in params]
    numbers = [
        is_drawn,
        list(map(_bits, divisors)),
        # All of them is no filter.
        [
            one.top_k if is_one and one.top_k < vocabulary else 0
            for one, is_one in zip(params, is_drawn, strict=True)
        ],
        [_bits(one.top_p if is_one else 1.0) for one, is_one in zip(params, is_drawn, strict=True)],
        [_bits(one.min_p if is_one else 0.0) for one, is_one in zip(params, is_drawn, strict=True)],
    ]
    return torch.cat([keys[None], torch.tensor(numbers, dtype=torch.int64)])


_HOST = torch.device("cpu")


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def launches(
    logits_RV: Tensor, told_6R: Tensor, mixed_V: Tensor, out_R: Tensor
) -> tuple[KernelLaunch, KernelLaunch, KernelLaunch]:
    """The launches, in their order."""
    num_rows, vocabulary = logits_RV.shape
    parts = triton.cdiv(vocabulary, _PART)
    device = logits_RV.device

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    given = Given(
        logits_RV,
        logits_RV.stride(0),
        told_6R,
        num_rows,
        scratch(num_rows, parts, dtype=torch.float32),
        scratch(num_rows, _BINS, dtype=torch.int64),
        scratch(num_rows, _BINS, dtype=torch.int32),
        mixed_V,
        scratch(num_rows, parts, dtype=torch.float32),
        scratch(num_rows, parts, dtype=torch.int32),
    )
    padded, each = triton.next_power_of_2(parts), (_PART, _TILE, _LISTED, _BINS, _BINS_PER_LOGIT)
    common = {
        "given": given,
        "sizes": DrawSizes(*map(tl.constexpr, (vocabulary, parts, padded, *each))),
        # Arrivals, and how many tokens are listed.
        "state": scratch(2, num_rows, dtype=torch.int32),
    }
    listed = scratch(num_rows, 2, vocabulary, dtype=torch.int32)
    last = {**common, "listed": listed, "out": out_R, "num_warps": 8}
    grid = (num_rows, parts)
    return (
        KernelLaunch(largest_kernel, grid, common, device),
        KernelLaunch(draw_kernel, grid, common, device),
        KernelLaunch(choose_kernel, grid, last, device),
    )


# -- what all three read ---------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _row(given: Given, sizes: DrawSizes) -> Row:
    row = tl.program_id(0).to(tl.int64)
    most = _largest_of_row(given.largest, row, sizes.PARTS, sizes.PADDED_PARTS)
    told, step = given.told + row, given.num_rows
    return Row(
        row,
        most,
        tl.load(told),
        tl.load(told + step),
        tl.load(told + 2 * step).to(tl.float64, bitcast=True).to(tl.float32),
        tl.load(told + 3 * step),
        tl.load(told + 4 * step).to(tl.float64, bitcast=True),
        tl.load(told + 5 * step).to(tl.float64, bitcast=True).to(tl.float32),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _largest_of_row(
    largest: tl.tensor, row: tl.tensor, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr
) -> Any:
    """The largest logit; NaN where one is."""
    part = tl.arange(0, PADDED_PARTS)
    found = tl.load(largest + row * PARTS + part, mask=part < PARTS, other=-INFINITY)
    return _largest_or_nan(found)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_or_nan(numbers: tl.tensor) -> Any:
    is_none = tl.max((numbers != numbers).to(tl.int32), 0)
    most = tl.max(tl.where(numbers == numbers, numbers, -INFINITY), 0)
    return tl.where(is_none != 0, float("nan"), most)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(given: Given, sizes: DrawSizes, row: Row, start: tl.tensor) -> Any:
    """Ids of a turn of a part, which of them are tokens, and how far these are below the largest.

    Logits less the largest, by the temperature; minus infinity for ids that are none.
    """
    id = tl.program_id(1) * sizes.PART + start + tl.arange(0, sizes.TILE)
    is_id = id < sizes.VOCABULARY
    place = given.logits + row.number * given.row_stride + id
    found = tl.load(place, mask=is_id, other=-INFINITY).to(tl.float32) - row.most
    return id, is_id, tl.div_rn(found, tl.full(found.shape, 1.0, tl.float32) * row.divisor)


# -- the launches ----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def largest_kernel(given: Given, sizes: DrawSizes, state: tl.tensor) -> None:
    """The largest logit of a part; and zeros for what the others add to."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = tl.full([sizes.TILE], -float("inf"), tl.float32)
    is_none = tl.full([sizes.TILE], 0, tl.int1)
    for start in range(0, sizes.PART, sizes.TILE):
        id = part * sizes.PART + start + tl.arange(0, sizes.TILE)
        place = given.logits + row * given.row_stride + id
        found = tl.load(place, mask=id < sizes.VOCABULARY, other=-INFINITY).to(tl.float32)
        is_none |= found != found
        most = tl.where(found > most, found, most)
    found = _largest_or_nan(tl.where(is_none, float("nan"), most))
    tl.store(given.largest + row * sizes.PARTS + part, found)
    if part == 0:
        place = row * sizes.BINS + tl.arange(0, sizes.BINS)
        tl.store(given.masses + place, tl.full([sizes.BINS], 0, tl.int64))
        tl.store(given.counts + place, tl.full([sizes.BINS], 0, tl.int32))
        tl.store(state + row, 0)
        tl.store(state + given.num_rows + row, 0)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(given: Given, sizes: DrawSizes, state: tl.tensor) -> None:
    """The best token of a part of a row without top-k and top-p; bins of one with."""
    row = _row(given, sizes)
    masses = given.masses + row.number * sizes.BINS
    counts = given.counts + row.number * sizes.BINS
    best, best_id = -float("inf"), NO_ID
    if tl.abs(row.most) < INFINITY:
        for start in range(0, sizes.PART, sizes.TILE):
            id, is_id, below = _tile(given, sizes, row, start)
            if (row.top_k > 0) | (row.top_p < 1.0):
                bin = bin_of(below, sizes)
                is_counted = bin < sizes.BINS - 1
                mass, one = units_of(below), tl.full([sizes.TILE], 1, tl.int32)
                tl.atomic_add(masses + bin, mass, mask=is_counted, sem="relaxed")
                tl.atomic_add(counts + bin, one, mask=is_counted, sem="relaxed")
            else:
                score = below
                if row.is_drawn != 0:
                    score = score_of(below, given.mixed, id, is_id, row.key)
                    score = tl.where(tl.exp(below) >= row.min_p, score, -INFINITY)
                best, best_id = better(best, best_id, tl.where(is_id, score, -INFINITY), id)
    place = row.number * sizes.PARTS + tl.program_id(1)
    tl.store(given.scores + place, best)
    tl.store(given.ids + place, best_id)


@triton.jit  # type: ignore[untyped-decorator]
def choose_kernel(
    given: Given, sizes: DrawSizes, state: tl.tensor, listed: tl.tensor, out: tl.tensor
) -> None:
    """The token of a row, by its last program where it has top-k or top-p."""
    row, part = _row(given, sizes), tl.program_id(1)
    is_finite = tl.abs(row.most) < INFINITY
    has_cut = ((row.top_k > 0) | (row.top_p < 1.0)) & is_finite
    if (not has_cut) & (part > 0):
        return
    best, best_id = -float("inf"), NO_ID
    if has_cut:
        bins = bins_of(given, sizes, row)
        keys = listed + row.number * 2 * sizes.VOCABULARY
        ids, count = keys + sizes.VOCABULARY, state + given.num_rows + row.number
        best, best_id = _above(given, sizes, row, bins, keys, ids, count, best, best_id)
        place = row.number * sizes.PARTS + part
        tl.store(given.scores + place, best)
        tl.store(given.ids + place, best_id)
        # What all threads have stored comes before the arrival, and it before what is read below.
        tl.debug_barrier()
        arrived = tl.atomic_add(state + row.number, 1, sem="acq_rel", scope="gpu")
        if arrived < sizes.PARTS - 1:
            return
        left = Listed(keys, ids, tl.load(count, cache_modifier=".cg"))
        best, best_id = between(given, sizes, row, bins, left, best, best_id)
    other = tl.arange(0, sizes.PADDED_PARTS)
    is_part, place = other < sizes.PARTS, row.number * sizes.PARTS + other
    score = tl.load(given.scores + place, mask=is_part, other=-INFINITY, cache_modifier=".cg")
    id = tl.load(given.ids + place, mask=is_part, other=NO_ID, cache_modifier=".cg")
    best, best_id = better(best, best_id, score, id)
    tl.store(out + row.number, tl.where(is_finite, best_id.to(tl.int64), -1))


@triton.jit  # type: ignore[untyped-decorator]
def _above(
    given: Given,
    sizes: DrawSizes,
    row: Row,
    bins: Bins,
    keys: tl.tensor,
    ids: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    best_id: tl.tensor,
) -> Any:
    """The best token of a part among those above the cuts; those between them are listed."""
    for start in range(0, sizes.PART, sizes.TILE):
        id, is_id, below = _tile(given, sizes, row, start)
        bin = bin_of(below, sizes)
        is_kept = is_id & (bin < bins.first)
        if tl.max(is_kept.to(tl.int32), 0) != 0:
            score = score_of(below, given.mixed, id, is_kept, row.key)
            is_kept &= tl.exp(below) >= row.min_p
            best, best_id = better(best, best_id, tl.where(is_kept, score, -INFINITY), id)
        is_listed = (bin >= bins.first) & (bin <= bins.last_p) & (bin <= bins.k_bin)
        is_listed = (is_listed | (bin == bins.k_bin)) & is_id & (below > -INFINITY)
        own = is_listed.to(tl.int32)
        own_count = tl.sum(own, 0)
        if own_count > 0:
            before = tl.atomic_add(count, own_count, sem="relaxed")
            to = before + tl.cumsum(own, 0) - own
            tl.store(keys + to, key_of(below), mask=is_listed)
            tl.store(ids + to, id, mask=is_listed)
    return best, best_id
