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
from typing import Any, NamedTuple

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
        "sizes": Sizes(*map(tl.constexpr, (vocabulary, parts, padded, *each))),
        # Arrivals, and how many tokens are listed.
        "state": scratch(2, num_rows, dtype=torch.int32),
    }
    listed = scratch(2, num_rows, vocabulary, dtype=torch.int32)
    last = {**common, "listed": listed, "out": out_R, "num_warps": 8}
    grid = (num_rows, parts)
    return (
        KernelLaunch(largest_kernel, grid, common, device),
        KernelLaunch(draw_kernel, grid, common, device),
        KernelLaunch(choose_kernel, grid, last, device),
    )


# -- what all three read ---------------------------------------------------------------------


class Given(NamedTuple):
    """Logits, what is told of their rows, and what launches leave for those behind them."""

    logits: Any
    row_stride: Any
    told: Any
    num_rows: Any
    largest: Any
    masses: Any
    counts: Any
    mixed: Any
    scores: Any
    ids: Any


class Sizes(NamedTuple):
    """The vocabulary, parts of it, and the numbers at the top, each a `tl.constexpr`."""

    VOCABULARY: Any
    PARTS: Any
    PADDED_PARTS: Any
    PART: Any
    TILE: Any
    LISTED: Any
    BINS: Any
    BINS_PER_LOGIT: Any


class Row(NamedTuple):
    """A row in a kernel: its number, its largest logit, and what `_told` says of it."""

    number: Any
    most: Any
    key: Any
    is_drawn: Any
    divisor: Any
    top_k: Any
    top_p: Any
    min_p: Any


@triton.jit  # type: ignore[untyped-decorator]
def _row(given: Given, sizes: Sizes) -> Row:
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
    found = tl.load(largest + row * PARTS + part, mask=part < PARTS, other=-_INFINITY)
    return _largest_or_nan(found)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_or_nan(numbers: tl.tensor) -> Any:
    is_none = tl.reduce((numbers != numbers).to(tl.int32), 0, _elementwise_max)
    most = tl.reduce(tl.where(numbers == numbers, numbers, -_INFINITY), 0, _elementwise_max)
    return tl.where(is_none != 0, float("nan"), most)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(given: Given, sizes: Sizes, row: Row, start: tl.tensor) -> Any:
    """Ids of a turn of a part, which of them are tokens, and how far these are below the largest.

    Logits less the largest, by the temperature; minus infinity for ids that are none.
    """
    id = tl.program_id(1) * sizes.PART + start + tl.arange(0, sizes.TILE)
    is_id = id < sizes.VOCABULARY
    place = given.logits + row.number * given.row_stride + id
    found = tl.load(place, mask=is_id, other=-_INFINITY).to(tl.float32) - row.most
    return id, is_id, tl.div_rn(found, tl.full(found.shape, 1.0, tl.float32) * row.divisor)


@triton.jit  # type: ignore[untyped-decorator]
def _units(below: tl.tensor) -> Any:
    """Masses as integers, rounded to nearest, ties to even."""
    whole = tl.exp(below) * _UNITS
    return tl.where(whole < 8388608.0, (whole + 8388608.0) - 8388608.0, whole).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _bin(below: tl.tensor, sizes: Sizes) -> Any:
    return tl.minimum(-below * sizes.BINS_PER_LOGIT, sizes.BINS - 1.0).to(tl.int32)


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
def largest_kernel(given: Given, sizes: Sizes, state: tl.tensor) -> None:
    """The largest logit of a part; and zeros for what the others add to."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    most = tl.full([sizes.TILE], -float("inf"), tl.float32)
    is_none = tl.full([sizes.TILE], 0, tl.int1)
    for start in range(0, sizes.PART, sizes.TILE):
        id = part * sizes.PART + start + tl.arange(0, sizes.TILE)
        place = given.logits + row * given.row_stride + id
        found = tl.load(place, mask=id < sizes.VOCABULARY, other=-_INFINITY).to(tl.float32)
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
def draw_kernel(given: Given, sizes: Sizes, state: tl.tensor) -> None:
    """The best token of a part of a row without top-k and top-p; bins of one with."""
    row = _row(given, sizes)
    masses = given.masses + row.number * sizes.BINS
    counts = given.counts + row.number * sizes.BINS
    best, best_id = -float("inf"), _NO_ID
    if tl.abs(row.most) < _INFINITY:
        for start in range(0, sizes.PART, sizes.TILE):
            id, is_id, below = _tile(given, sizes, row, start)
            if (row.top_k > 0) | (row.top_p < 1.0):
                bin = _bin(below, sizes)
                is_counted = bin < sizes.BINS - 1
                mass, one = _units(below), tl.full([sizes.TILE], 1, tl.int32)
                tl.atomic_add(masses + bin, mass, mask=is_counted, sem="relaxed")
                tl.atomic_add(counts + bin, one, mask=is_counted, sem="relaxed")
            else:
                score = below
                if row.is_drawn != 0:
                    score = _score(below, given.mixed, id, is_id, row.key)
                    score = tl.where(tl.exp(below) >= row.min_p, score, -_INFINITY)
                best, best_id = _better(best, best_id, tl.where(is_id, score, -_INFINITY), id)
    place = row.number * sizes.PARTS + tl.program_id(1)
    tl.store(given.scores + place, best)
    tl.store(given.ids + place, best_id)


@triton.jit  # type: ignore[untyped-decorator]
def choose_kernel(
    given: Given, sizes: Sizes, state: tl.tensor, listed: tl.tensor, out: tl.tensor
) -> None:
    """The token of a row, by its last program where it has top-k or top-p."""
    row, part = _row(given, sizes), tl.program_id(1)
    is_finite = tl.abs(row.most) < _INFINITY
    has_cut = ((row.top_k > 0) | (row.top_p < 1.0)) & is_finite
    if (not has_cut) & (part > 0):
        return
    best, best_id = -float("inf"), _NO_ID
    if has_cut:
        bins = _bins(given, sizes, row)
        keys = listed + row.number * sizes.VOCABULARY
        ids, count = keys + given.num_rows.to(tl.int64) * sizes.VOCABULARY, state + given.num_rows
        count += row.number
        best, best_id = _above(given, sizes, row, bins, keys, ids, count, best, best_id)
        place = row.number * sizes.PARTS + part
        tl.store(given.scores + place, best)
        tl.store(given.ids + place, best_id)
        # What all threads have stored comes before the arrival, and it before what is read below.
        tl.debug_barrier()
        arrived = tl.atomic_add(state + row.number, 1, sem="acq_rel", scope="gpu")
        if arrived < sizes.PARTS - 1:
            return
        between = Listed(keys, ids, tl.load(count, cache_modifier=".cg"))
        best, best_id = _between(given, sizes, row, bins, between, best, best_id)
    other = tl.arange(0, sizes.PADDED_PARTS)
    is_part, place = other < sizes.PARTS, row.number * sizes.PARTS + other
    score = tl.load(given.scores + place, mask=is_part, other=-_INFINITY, cache_modifier=".cg")
    id = tl.load(given.ids + place, mask=is_part, other=_NO_ID, cache_modifier=".cg")
    best, best_id = _better(best, best_id, score, id)
    tl.store(out + row.number, tl.where(is_finite, best_id.to(tl.int64), -1))


class Bins(NamedTuple):
    """Between which bins a cut lies; behind all bins where there is none.

    Args:
        k_bin: Bin of the last token of top-k.
        k_count: Number of tokens before it.
        k_mass: Mass of those.
        first: The first bin with a cut.
        first_mass: Mass before that.
        last_p: The last bin in which the cut of top-p may lie.
        mass: Mass of all tokens without top-k.
    """

    k_bin: Any
    k_count: Any
    k_mass: Any
    first: Any
    first_mass: Any
    last_p: Any
    mass: Any


@triton.jit  # type: ignore[untyped-decorator]
def _bins(given: Given, sizes: Sizes, row: Row) -> Bins:
    """Of both cuts, the bin in which it lies."""
    number = tl.arange(0, sizes.BINS)
    place = row.number * sizes.BINS + number
    bin_mass, bin_count = tl.load(given.masses + place), tl.load(given.counts + place)
    mass_to = tl.associative_scan(bin_mass, 0, _sum_combine)
    count_to = tl.associative_scan(bin_count, 0, _sum_combine)
    k_bin, k_count, k_mass = tl.full([], sizes.BINS, tl.int32), row.top_k * 0, row.top_k * 0
    least_mass = tl.reduce(bin_mass, 0, _sum_combine)
    most_mass = least_mass
    if row.top_k > 0:
        k_bin = _first_bin(count_to >= row.top_k, sizes)
        k_count = _up_to(bin_count.to(tl.int64), number, k_bin)
        k_mass = _up_to(bin_mass, number, k_bin)
        least_mass, most_mass = k_mass, _up_to(bin_mass, number, k_bin + 1)
    p_bin, last_p = tl.full([], sizes.BINS, tl.int32), tl.full([], sizes.BINS, tl.int32)
    if row.top_p < 1.0:
        p_bin = _first_bin(mass_to.to(tl.float64) >= row.top_p * least_mass, sizes)
        last_p = _first_bin(mass_to.to(tl.float64) >= row.top_p * most_mass, sizes)
    first = tl.minimum(k_bin, p_bin)
    first_mass = _up_to(bin_mass, number, first)
    return Bins(k_bin, k_count, k_mass, first, first_mass, last_p, least_mass)


@triton.jit  # type: ignore[untyped-decorator]
def _first_bin(is_reached: tl.tensor, sizes: Sizes) -> Any:
    """The first bin that reaches what is wanted; the last one where none does."""
    return tl.minimum(tl.reduce((~is_reached).to(tl.int32), 0, _sum_combine), sizes.BINS - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _up_to(of_bins: tl.tensor, number: tl.tensor, end: tl.tensor) -> Any:
    return tl.reduce(tl.where(number < end, of_bins, 0), 0, _sum_combine)


@triton.jit  # type: ignore[untyped-decorator]
def _above(
    given: Given,
    sizes: Sizes,
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
        bin = _bin(below, sizes)
        is_kept = is_id & (bin < bins.first)
        if tl.reduce(is_kept.to(tl.int32), 0, _elementwise_max) != 0:
            score = _score(below, given.mixed, id, is_kept, row.key)
            is_kept &= tl.exp(below) >= row.min_p
            best, best_id = _better(best, best_id, tl.where(is_kept, score, -_INFINITY), id)
        is_listed = (bin >= bins.first) & (bin <= bins.last_p) & (bin <= bins.k_bin)
        is_listed = (is_listed | (bin == bins.k_bin)) & is_id & (below > -_INFINITY)
        own = is_listed.to(tl.int32)
        own_count = tl.reduce(own, 0, _sum_combine)
        if own_count > 0:
            before = tl.atomic_add(count, own_count, sem="relaxed")
            to = before + tl.associative_scan(own, 0, _sum_combine) - own
            tl.store(keys + to, _key(below), mask=is_listed)
            tl.store(ids + to, id, mask=is_listed)
    return best, best_id


# -- the tokens between the cuts -------------------------------------------------------------


class Listed(NamedTuple):
    """Keys and ids of the tokens of a row that are listed, and their number."""

    keys: Any
    ids: Any
    count: Any


@triton.jit  # type: ignore[untyped-decorator]
def _turn(listed: Listed, start: tl.tensor, sizes: Sizes) -> Any:
    """Keys and ids of a turn, and which of them are there."""
    at = start + tl.arange(0, sizes.LISTED)
    is_one = at < listed.count
    key = tl.load(listed.keys + at, mask=is_one, other=_LEAST_KEY, cache_modifier=".cg")
    id = tl.load(listed.ids + at, mask=is_one, other=_NO_ID, cache_modifier=".cg")
    return key, id, is_one


@triton.jit  # type: ignore[untyped-decorator]
def _between(
    given: Given,
    sizes: Sizes,
    row: Row,
    bins: Bins,
    listed: Listed,
    best: tl.tensor,
    best_id: tl.tensor,
) -> Any:
    """The best of `best` and of the listed tokens that both cuts keep."""
    # The least key of top-k that is kept, and the last id of those with this key.
    k_key, k_id = _LEAST_KEY, _NO_ID
    mass = bins.mass
    if row.top_k > 0:
        k_key, above, mass_above = _cut(
            listed, bins.k_bin, bins.k_bin, bins.k_count, row.top_k.to(tl.float64), False,
            _LEAST_KEY, _NO_ID, sizes,
        )  # fmt: skip
        ties = row.top_k - above
        k_id = _last_id(listed, k_key, ties, sizes)
        mass = bins.k_mass + mass_above + ties * _units_of(k_key)
    p_key, p_id = _LEAST_KEY, _NO_ID
    if row.top_p < 1.0:
        needed = row.top_p * mass
        last_bin = tl.minimum(bins.last_p, bins.k_bin)
        p_key, above, _ = _cut(
            listed, bins.first, last_bin, bins.first_mass, needed, True, k_key, k_id, sizes
        )
        # The ones before it have less mass than is needed, and so it is kept.
        units = _units_of(p_key).to(tl.float64)
        fits = (needed - above.to(tl.float64)) / tl.maximum(units, 1.0)
        ties = tl.where(units > 0, tl.ceil(fits), 2147483647.0).to(tl.int64)
        p_id = _last_id(listed, p_key, ties, sizes)
    for start in range(0, listed.count, sizes.LISTED):
        key, id, is_kept = _turn(listed, start, sizes)
        below = _of_key(key)
        is_kept &= (key > k_key) | ((key == k_key) & (id <= k_id))
        is_kept &= (key > p_key) | ((key == p_key) & (id <= p_id))
        is_kept &= tl.exp(below) >= row.min_p
        score = _score(below, given.mixed, id, is_kept, row.key)
        best, best_id = _better(best, best_id, tl.where(is_kept, score, -_INFINITY), id)
    return best, best_id


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
    listed: Listed,
    first_bin: tl.tensor,
    last_bin: tl.tensor,
    before: tl.tensor,
    needed: tl.tensor,
    BY_MASS: tl.constexpr,
    k_key: tl.tensor,
    k_id: tl.tensor,
    sizes: Sizes,
) -> Any:
    """The least key such that the tokens above it, and those before the bins, are not enough.

    Returns:
        The key, how many tokens are above it or what mass they have, and the mass of those that
        are listed.
    """
    low, high = _LEAST_KEY - 1, listed.count * 0
    above, mass_above = before, before * 0
    while high - low > 1:
        middle = low + (high - low) // 2
        total, mass = before, before * 0
        for start in range(0, listed.count, sizes.LISTED):
            key, id, is_one = _turn(listed, start, sizes)
            below = _of_key(key)
            bin = _bin(below, sizes)
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
def _last_id(listed: Listed, key: tl.tensor, number: tl.tensor, sizes: Sizes) -> Any:
    """The least id such that so many tokens with this key have it or a lower one."""
    low, high = listed.count * 0 - 1, listed.count * 0 + sizes.VOCABULARY
    while high - low > 1:
        middle = low + (high - low) // 2
        found = number * 0
        for start in range(0, listed.count, sizes.LISTED):
            own, id, is_one = _turn(listed, start, sizes)
            is_one &= (own == key) & (id <= middle)
            found += tl.reduce(is_one.to(tl.int64), 0, _sum_combine)
        if found >= number:
            high = middle
        else:
            low = middle
    return high
