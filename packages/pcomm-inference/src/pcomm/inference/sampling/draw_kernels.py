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
from triton.language.standard import (  # type: ignore[import-untyped]
    _elementwise_max,
    _elementwise_min,
    _sum_combine,
)

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.kernel_arithmetic import DTYPES
from pcomm.inference.sampling.filters import UNITS
from pcomm.inference.sampling.noise import DRAW_1, DRAW_2, UNIFORM_BITS, TokenNoise, row_keys
from pcomm.inference.sampling.params import SamplingRow

__all__ = ["choose", "launches", "takes_logits"]

# Ids of a part, of a turn of its loop, and listed tokens of a turn.
_PART, _TILE, _LISTED = 4096, 1024, 1024
# Bins of logits below the largest: so many of them, and so many for each unit of a logit. Behind
# the last lie tokens without a unit of mass.
_BINS, _BINS_PER_LOGIT = 1024, 46.0

_UNITS, _LOW_BITS = tl.constexpr(UNITS), tl.constexpr(64 - UNIFORM_BITS)
_FIRST, _SECOND = tl.constexpr(DRAW_1), tl.constexpr(DRAW_2)
_HALF, _SCALE = tl.constexpr(2.0 ** (UNIFORM_BITS - 1)), tl.constexpr(2.0**-UNIFORM_BITS)
_LEAST, _MOST = tl.constexpr(2.0 ** -(UNIFORM_BITS + 1)), tl.constexpr(1 - 2.0**-24)
_INFINITY = tl.constexpr(float("inf"))
_NO_ID = tl.constexpr(2**31 - 1)
# The magnitude of minus infinity, the least key.
_LEAST_KEY = tl.constexpr(-0x7F800000)


def takes_logits(logits_RV: Tensor) -> bool:
    """Whether `choose` reads such logits."""
    return logits_RV.dtype in DTYPES and logits_RV.stride(1) == 1


def choose(
    logits_RV: Tensor, rows: Sequence[SamplingRow], divisors: Sequence[float], noise: TokenNoise
) -> Tensor:
    """int64 `[R]`, the token of each row; -1 where the largest logit is not finite. Local.

    Args:
        logits_RV: Logits that `takes_logits`, edited and masked.
        rows: Settings of each row.
        divisors: Temperatures, within the range that fp32 divides by.
        noise: Noise of the vocabulary.
    """
    told = _told(rows, divisors, logits_RV.shape[1]).to(logits_RV.device)
    out_R = torch.empty(len(rows), dtype=torch.int64, device=logits_RV.device)
    for launch in launches(logits_RV, told, noise.mixed_V, out_R):
        launch.run()
    return out_R


def _told(rows: Sequence[SamplingRow], divisors: Sequence[float], vocabulary: int) -> Tensor:
    """int64 `[6, R]` on the host: what kernels are told of each row, numbers as bits of fp64.

    The key of its noise, 1 where it draws, temperature, k or 0, `top_p`, and `min_p` as fp32.
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

    common = {
        "logits": logits_RV,
        "row_stride": logits_RV.stride(0),
        "told": told_6R,
        "largest": scratch(num_rows, parts, dtype=torch.float32),
        "masses": scratch(num_rows, _BINS, dtype=torch.int64),
        "counts": scratch(num_rows, _BINS, dtype=torch.int32),
        "num_rows": num_rows,
        "VOCABULARY": vocabulary,
        "PARTS": parts,
        "PADDED_PARTS": triton.next_power_of_2(parts),
        "PART": _PART,
        "TILE": _TILE,
        "BINS": _BINS,
        "BINS_PER_LOGIT": _BINS_PER_LOGIT,
    }
    of_parts = {
        "mixed": mixed_V,
        "scores": scratch(num_rows, parts, dtype=torch.float32),
        "ids": scratch(num_rows, parts, dtype=torch.int32),
    }
    # Arrivals, and how many tokens are listed.
    state = scratch(2, num_rows, dtype=torch.int32)
    grid = (num_rows, parts)
    listed = scratch(2, num_rows, vocabulary, dtype=torch.int32)
    return (
        KernelLaunch(largest_kernel, grid, {**common, "state": state}, device),
        KernelLaunch(draw_kernel, grid, {**common, **of_parts}, device),
        KernelLaunch(
            choose_kernel,
            grid,
            {
                **common,
                **of_parts,
                "state": state,
                "listed": listed,
                "out": out_R,
                "LISTED": _LISTED,
                "num_warps": 8,
            },
            device,
        ),
    )


# -- what all three read ---------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _number(told: tl.tensor, place: tl.constexpr, num_rows: tl.tensor, row: tl.tensor) -> Any:
    return tl.load(told + place * num_rows + row).to(tl.float64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_of_row(
    largest: tl.tensor, row: tl.tensor, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr
) -> Any:
    """The largest logit; NaN where one is."""
    part = tl.arange(0, PADDED_PARTS)
    found = tl.load(largest + row * PARTS + part, mask=part < PARTS, other=-_INFINITY)
    return _largest_or_nan(found)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_or_nan(numbers: tl.tensor) -> Any:
    is_none = tl.reduce((numbers != numbers).to(tl.int32), 0, _elementwise_max)
    most = tl.reduce(tl.where(numbers == numbers, numbers, -_INFINITY), 0, _elementwise_max)
    return tl.where(is_none != 0, float("nan"), most)


@triton.jit  # type: ignore[untyped-decorator]
def _below(
    logits: tl.tensor, id: tl.tensor, is_id: tl.tensor, most: tl.tensor, divisor: tl.tensor
) -> Any:
    """Logits less the largest, by the temperature; minus infinity for ids that are none."""
    found = tl.load(logits + id, mask=is_id, other=-_INFINITY).to(tl.float32) - most
    return tl.div_rn(found, tl.full(found.shape, 1.0, tl.float32) * divisor)


@triton.jit  # type: ignore[untyped-decorator]
def _units(below: tl.tensor) -> Any:
    """Masses as integers, rounded to nearest, ties to even."""
    whole = tl.exp(below) * _UNITS
    return tl.where(whole < 8388608.0, (whole + 8388608.0) - 8388608.0, whole).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _bin(below: tl.tensor, BINS: tl.constexpr, BINS_PER_LOGIT: tl.constexpr) -> Any:
    return tl.minimum(-below * BINS_PER_LOGIT, BINS - 1.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _score(
    below: tl.tensor, mixed: tl.tensor, id: tl.tensor, is_id: tl.tensor, key: tl.tensor
) -> Any:
    """`below` and the noise of `TokenNoise.gumbel`."""
    bits = (tl.load(mixed + id, mask=is_id, other=0) ^ key) * _FIRST
    bits = (bits ^ (bits >> 32)) * _SECOND
    uniform = ((bits >> _LOW_BITS).to(tl.float32) + _HALF) * _SCALE
    uniform = tl.minimum(tl.maximum(uniform, _LEAST), _MOST)
    # log(1 - u) with all digits of a small u: the error of 1 - u is divided out.
    rest = 1.0 - uniform
    safe = tl.where(rest == 1.0, 0.5, rest)
    logarithm = tl.where(rest == 1.0, -uniform, tl.log(safe) * tl.div_rn(-uniform, safe - 1.0))
    return below - tl.log(-logarithm)


@triton.jit  # type: ignore[untyped-decorator]
def _better(best: tl.tensor, best_id: tl.tensor, score: tl.tensor, id: tl.tensor) -> Any:
    """The largest score of those before and of a tile, of equal ones the lowest id."""
    most = tl.reduce(score, 0, _elementwise_max)
    first = tl.reduce(tl.where(score == most, id, _NO_ID), 0, _elementwise_min)
    is_better = (most > best) | ((most == best) & (first < best_id))
    return tl.where(is_better, most, best), tl.where(is_better, first, best_id)


# -- the launches ----------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def largest_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    told: tl.tensor,
    largest: tl.tensor,
    masses: tl.tensor,
    counts: tl.tensor,
    num_rows: tl.tensor,
    state: tl.tensor,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_LOGIT: tl.constexpr,
) -> None:
    """The largest logit of a part; and zeros for what the others add to."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = tl.full([TILE], -float("inf"), tl.float32)
    is_none = tl.full([TILE], 0, tl.int1)
    for start in range(0, PART, TILE):
        id = part * PART + start + tl.arange(0, TILE)
        found = tl.load(logits + row * row_stride + id, mask=id < VOCABULARY, other=-_INFINITY)
        found = found.to(tl.float32)
        is_none |= found != found
        most = tl.where(found > most, found, most)
    found = _largest_or_nan(tl.where(is_none, float("nan"), most))
    tl.store(largest + row * PARTS + part, found)
    if part == 0:
        place = row * BINS + tl.arange(0, BINS)
        tl.store(masses + place, tl.full([BINS], 0, tl.int64))
        tl.store(counts + place, tl.full([BINS], 0, tl.int32))
        tl.store(state + row, 0)
        tl.store(state + num_rows + row, 0)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    told: tl.tensor,
    largest: tl.tensor,
    masses: tl.tensor,
    counts: tl.tensor,
    num_rows: tl.tensor,
    mixed: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_LOGIT: tl.constexpr,
) -> None:
    """The best token of a part of a row without top-k and top-p; bins of one with."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = _largest_of_row(largest, row, PARTS, PADDED_PARTS)
    key, is_drawn = tl.load(told + row), tl.load(told + num_rows + row)
    divisor = _number(told, 2, num_rows, row).to(tl.float32)
    top_k, top_p = tl.load(told + 3 * num_rows + row), _number(told, 4, num_rows, row)
    min_p = _number(told, 5, num_rows, row).to(tl.float32)
    best, best_id = -float("inf"), _NO_ID
    if tl.abs(most) < _INFINITY:
        for start in range(0, PART, TILE):
            id = part * PART + start + tl.arange(0, TILE)
            is_id = id < VOCABULARY
            below = _below(logits + row * row_stride, id, is_id, most, divisor)
            if (top_k > 0) | (top_p < 1.0):
                bin = _bin(below, BINS, BINS_PER_LOGIT)
                is_counted = bin < BINS - 1
                units = _units(below)
                tl.atomic_add(masses + row * BINS + bin, units, mask=is_counted, sem="relaxed")
                one = tl.full([TILE], 1, tl.int32)
                tl.atomic_add(counts + row * BINS + bin, one, mask=is_counted, sem="relaxed")
            else:
                score = below
                if is_drawn != 0:
                    score = _score(below, mixed, id, is_id, key)
                    score = tl.where(tl.exp(below) >= min_p, score, -_INFINITY)
                best, best_id = _better(best, best_id, tl.where(is_id, score, -_INFINITY), id)
    tl.store(scores + row * PARTS + part, best)
    tl.store(ids + row * PARTS + part, best_id)


@triton.jit  # type: ignore[untyped-decorator]
def choose_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    told: tl.tensor,
    largest: tl.tensor,
    masses: tl.tensor,
    counts: tl.tensor,
    num_rows: tl.tensor,
    mixed: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    state: tl.tensor,
    listed: tl.tensor,
    out: tl.tensor,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_LOGIT: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    """The token of a row, by its last program where it has top-k or top-p."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = _largest_of_row(largest, row, PARTS, PADDED_PARTS)
    key = tl.load(told + row)
    divisor = _number(told, 2, num_rows, row).to(tl.float32)
    top_k, top_p = tl.load(told + 3 * num_rows + row), _number(told, 4, num_rows, row)
    min_p = _number(told, 5, num_rows, row).to(tl.float32)
    has_cut = ((top_k > 0) | (top_p < 1.0)) & (tl.abs(most) < _INFINITY)
    if (not has_cut) & (part > 0):
        return
    best, best_id = -float("inf"), _NO_ID
    if has_cut:
        # Of both cuts, the bin in which it lies; behind all bins where there is none.
        place = row * BINS + tl.arange(0, BINS)
        bin_mass, bin_count = tl.load(masses + place), tl.load(counts + place)
        mass_to = tl.associative_scan(bin_mass, 0, _sum_combine)
        count_to = tl.associative_scan(bin_count, 0, _sum_combine)
        number = tl.arange(0, BINS)
        k_bin, k_count, k_mass = BINS, top_k * 0, top_k * 0
        least_mass = tl.reduce(bin_mass, 0, _sum_combine)
        most_mass = least_mass
        if top_k > 0:
            k_bin = _first_bin(count_to >= top_k, BINS)
            k_count = _up_to(bin_count.to(tl.int64), number, k_bin)
            k_mass = _up_to(bin_mass, number, k_bin)
            least_mass, most_mass = k_mass, _up_to(bin_mass, number, k_bin + 1)
        p_bin, last_p_bin = BINS, BINS
        if top_p < 1.0:
            p_bin = _first_bin(mass_to.to(tl.float64) >= top_p * least_mass, BINS)
            last_p_bin = _first_bin(mass_to.to(tl.float64) >= top_p * most_mass, BINS)
        first_bin = tl.minimum(k_bin, p_bin)
        first_mass = _up_to(bin_mass, number, first_bin)
        listed_keys = listed + row * VOCABULARY
        listed_ids = listed_keys + num_rows.to(tl.int64) * VOCABULARY
        for start in range(0, PART, TILE):
            id = part * PART + start + tl.arange(0, TILE)
            is_id = id < VOCABULARY
            below = _below(logits + row * row_stride, id, is_id, most, divisor)
            bin = _bin(below, BINS, BINS_PER_LOGIT)
            is_kept = is_id & (bin < first_bin)
            if tl.reduce(is_kept.to(tl.int32), 0, _elementwise_max) != 0:
                score = _score(below, mixed, id, is_kept, key)
                is_kept &= tl.exp(below) >= min_p
                best, best_id = _better(best, best_id, tl.where(is_kept, score, -_INFINITY), id)
            is_listed = (bin >= first_bin) & (bin <= last_p_bin) & (bin <= k_bin)
            is_listed = (is_listed | (bin == k_bin)) & is_id & (below > -_INFINITY)
            own = is_listed.to(tl.int32)
            own_count = tl.reduce(own, 0, _sum_combine)
            if own_count > 0:
                before = tl.atomic_add(state + num_rows + row, own_count, sem="relaxed")
                to = before + tl.associative_scan(own, 0, _sum_combine) - own
                tl.store(listed_keys + to, _key(below), mask=is_listed)
                tl.store(listed_ids + to, id, mask=is_listed)
        tl.store(scores + row * PARTS + part, best)
        tl.store(ids + row * PARTS + part, best_id)
        # What all threads have stored comes before the arrival, and it before what is read below.
        tl.debug_barrier()
        arrived = tl.atomic_add(state + row, 1, sem="acq_rel", scope="gpu")
        if arrived < PARTS - 1:
            return
        num_listed = tl.load(state + num_rows + row, cache_modifier=".cg")
        # The least key of top-k that is kept, and the last id of those with this key.
        k_key, k_id = _LEAST_KEY, _NO_ID
        all_mass = least_mass
        if top_k > 0:
            k_key, above, k_mass_of = _cut(
                listed_keys, num_listed, k_bin, k_bin, k_count, top_k.to(tl.float64), False,
                _LEAST_KEY, _NO_ID, listed_ids, BINS, BINS_PER_LOGIT, LISTED,
            )  # fmt: skip
            k_id = _last_id(
                listed_keys, listed_ids, num_listed, k_key, top_k - above, VOCABULARY, LISTED
            )
            ties = top_k - above
            all_mass = k_mass + k_mass_of + ties * _units_of(k_key)
        p_key, p_id = _LEAST_KEY, _NO_ID
        if top_p < 1.0:
            needed = top_p * all_mass
            last_bin = tl.minimum(last_p_bin, k_bin)
            p_key, above, _ = _cut(
                listed_keys, num_listed, first_bin, last_bin, first_mass, needed, True,
                k_key, k_id, listed_ids, BINS, BINS_PER_LOGIT, LISTED,
            )  # fmt: skip
            # The ones before it have less mass than is needed, and so it is kept.
            units = _units_of(p_key).to(tl.float64)
            fits = (needed - above.to(tl.float64)) / tl.maximum(units, 1.0)
            ties = tl.where(units > 0, tl.ceil(fits), 2147483647.0).to(tl.int64)
            p_id = _last_id(listed_keys, listed_ids, num_listed, p_key, ties, VOCABULARY, LISTED)
        for start in range(0, num_listed, LISTED):
            at = start + tl.arange(0, LISTED)
            is_one = at < num_listed
            own_key = tl.load(listed_keys + at, mask=is_one, other=0, cache_modifier=".cg")
            id = tl.load(listed_ids + at, mask=is_one, other=0, cache_modifier=".cg")
            below = _of_key(own_key)
            is_kept = is_one & ((own_key > k_key) | ((own_key == k_key) & (id <= k_id)))
            is_kept &= (own_key > p_key) | ((own_key == p_key) & (id <= p_id))
            is_kept &= tl.exp(below) >= min_p
            score = _score(below, mixed, id, is_kept, key)
            best, best_id = _better(best, best_id, tl.where(is_kept, score, -_INFINITY), id)
    other = tl.arange(0, PADDED_PARTS)
    is_part = other < PARTS
    place = row * PARTS + other
    score = tl.load(scores + place, mask=is_part, other=-_INFINITY, cache_modifier=".cg")
    id = tl.load(ids + place, mask=is_part, other=_NO_ID, cache_modifier=".cg")
    best, best_id = _better(best, best_id, score, id)
    tl.store(out + row, tl.where(tl.abs(most) < _INFINITY, best_id.to(tl.int64), -1))


@triton.jit  # type: ignore[untyped-decorator]
def _first_bin(is_reached: tl.tensor, BINS: tl.constexpr) -> Any:
    """The first bin that reaches what is wanted; the last one where none does."""
    return tl.minimum(tl.reduce((~is_reached).to(tl.int32), 0, _sum_combine), BINS - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _up_to(of_bins: tl.tensor, number: tl.tensor, end: tl.tensor) -> Any:
    return tl.reduce(tl.where(number < end, of_bins, 0), 0, _sum_combine)


# A key is an integer in the order of the logits, none of which is above 0.
@triton.jit  # type: ignore[untyped-decorator]
def _key(below: tl.tensor) -> Any:
    return -(below.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _of_key(key: tl.tensor) -> Any:
    return -((-key).to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _units_of(key: tl.tensor) -> Any:
    return tl.reduce(_units(_of_key(tl.full([1], 0, tl.int32) + key)), 0, _sum_combine)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(
    keys: tl.tensor,
    num_listed: tl.tensor,
    first_bin: tl.tensor,
    last_bin: tl.tensor,
    before: tl.tensor,
    needed: tl.tensor,
    BY_MASS: tl.constexpr,
    k_key: tl.tensor,
    k_id: tl.tensor,
    ids: tl.tensor,
    BINS: tl.constexpr,
    BINS_PER_LOGIT: tl.constexpr,
    LISTED: tl.constexpr,
) -> Any:
    """The least key such that the tokens above it, and those before the bins, are not enough.

    Returns:
        The key, how many tokens are above it or what mass they have, and the mass of those that
        are listed.
    """
    low, high = _LEAST_KEY - 1, num_listed * 0
    above, mass_above = before, before * 0
    while high - low > 1:
        middle = low + (high - low) // 2
        total, mass = before, before * 0
        for start in range(0, num_listed, LISTED):
            at = start + tl.arange(0, LISTED)
            is_one = at < num_listed
            key = tl.load(keys + at, mask=is_one, other=_LEAST_KEY, cache_modifier=".cg")
            id = tl.load(ids + at, mask=is_one, other=0, cache_modifier=".cg")
            below = _of_key(key)
            bin = _bin(below, BINS, BINS_PER_LOGIT)
            is_one &= (key > middle) & (bin >= first_bin) & (bin <= last_bin)
            is_one &= (key > k_key) | ((key == k_key) & (id <= k_id))
            units = tl.reduce(tl.where(is_one, _units(below), 0), 0, _sum_combine)
            mass += units
            total += units if BY_MASS else tl.reduce(is_one.to(tl.int64), 0, _sum_combine)
        if total.to(tl.float64) < needed:
            high, above, mass_above = middle, total, mass
        else:
            low = middle
    return high, above, mass_above


@triton.jit  # type: ignore[untyped-decorator]
def _last_id(
    keys: tl.tensor,
    ids: tl.tensor,
    num_listed: tl.tensor,
    key: tl.tensor,
    number: tl.tensor,
    VOCABULARY: tl.constexpr,
    LISTED: tl.constexpr,
) -> Any:
    """The least id such that so many tokens with this key have it or a lower one."""
    low, high = num_listed * 0 - 1, num_listed * 0 + VOCABULARY
    while high - low > 1:
        middle = low + (high - low) // 2
        found = number * 0
        for start in range(0, num_listed, LISTED):
            at = start + tl.arange(0, LISTED)
            is_one = at < num_listed
            own = tl.load(keys + at, mask=is_one, other=0, cache_modifier=".cg")
            id = tl.load(ids + at, mask=is_one, other=_NO_ID, cache_modifier=".cg")
            is_one &= (own == key) & (id <= middle)
            found += tl.reduce(is_one.to(tl.int64), 0, _sum_combine)
        if found >= number:
            high = middle
        else:
            low = middle
    return high
