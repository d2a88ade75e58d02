"""Where the cuts of top-k and top-p of a row lie, by bins and then among the tokens of a list.

Importing this file imports Triton. These are pieces of the kernels in `draw_kernels`, which fill
the bins and the list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.inference.sampling.filters import UNITS
from pcomm.inference.sampling.noise import DRAW_1, DRAW_2, UNIFORM_BITS

__all__ = [
    "INFINITY",
    "NO_ID",
    "Bins",
    "DrawSizes",
    "Given",
    "Listed",
    "Row",
    "better",
    "between",
    "bin_of",
    "bins_of",
    "key_of",
    "score_of",
    "units_of",
]

_UNITS, _LOW_BITS = tl.constexpr(UNITS), tl.constexpr(64 - UNIFORM_BITS)
_FIRST, _SECOND = tl.constexpr(DRAW_1), tl.constexpr(DRAW_2)
_HALF, _SCALE = tl.constexpr(2.0 ** (UNIFORM_BITS - 1)), tl.constexpr(2.0**-UNIFORM_BITS)
_LEAST, _MOST = tl.constexpr(2.0 ** -(UNIFORM_BITS + 1)), tl.constexpr(1 - 2.0**-24)
INFINITY = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(2**31 - 1)
# The magnitude of minus infinity, the least key.
_LEAST_KEY = tl.constexpr(-0x7F800000)


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


class DrawSizes(NamedTuple):
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
def units_of(below: tl.tensor) -> Any:
    """Masses as integers, rounded to nearest, ties to even."""
    whole = tl.exp(below) * _UNITS
    return tl.where(whole < 8388608.0, (whole + 8388608.0) - 8388608.0, whole).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def bin_of(below: tl.tensor, sizes: DrawSizes) -> Any:
    """Bins of logits; the last one is that of all far below the largest."""
    return tl.minimum(-below * sizes.BINS_PER_LOGIT, sizes.BINS - 1.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def score_of(
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
def better(best: tl.tensor, best_id: tl.tensor, score: tl.tensor, id: tl.tensor) -> Any:
    """The largest score of those before and of a tile, of equal ones the lowest id."""
    most = tl.max(score, 0)
    first = tl.min(tl.where(score == most, id, NO_ID), 0)
    is_better = (most > best) | ((most == best) & (first < best_id))
    return tl.where(is_better, most, best), tl.where(is_better, first, best_id)


# -- the bins --------------------------------------------------------------------------------


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
def bins_of(given: Given, sizes: DrawSizes, row: Row) -> Bins:
    """Of both cuts, the bin in which it lies."""
    number = tl.arange(0, sizes.BINS)
    place = row.number * sizes.BINS + number
    bin_mass, bin_count = tl.load(given.masses + place), tl.load(given.counts + place)
    mass_to = tl.cumsum(bin_mass, 0)
    count_to = tl.cumsum(bin_count, 0)
    k_bin, k_count, k_mass = tl.full([], sizes.BINS, tl.int32), row.top_k * 0, row.top_k * 0
    least_mass = tl.sum(bin_mass, 0)
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
def _first_bin(is_reached: tl.tensor, sizes: DrawSizes) -> Any:
    """The first bin that reaches what is wanted; the last one where none does."""
    return tl.minimum(tl.sum((~is_reached).to(tl.int32), 0), sizes.BINS - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _up_to(of_bins: tl.tensor, number: tl.tensor, end: tl.tensor) -> Any:
    return tl.sum(tl.where(number < end, of_bins, 0), 0)


# -- the tokens between the cuts -------------------------------------------------------------


class Listed(NamedTuple):
    """Keys and ids of the tokens of a row that are listed, and their number."""

    keys: Any
    ids: Any
    count: Any


@triton.jit  # type: ignore[untyped-decorator]
def _turn(listed: Listed, start: tl.tensor, sizes: DrawSizes) -> Any:
    """Keys and ids of a turn, and which of them are there."""
    at = start + tl.arange(0, sizes.LISTED)
    is_one = at < listed.count
    key = tl.load(listed.keys + at, mask=is_one, other=_LEAST_KEY, cache_modifier=".cg")
    id = tl.load(listed.ids + at, mask=is_one, other=NO_ID, cache_modifier=".cg")
    return key, id, is_one


@triton.jit  # type: ignore[untyped-decorator]
def between(
    given: Given,
    sizes: DrawSizes,
    row: Row,
    bins: Bins,
    listed: Listed,
    best: tl.tensor,
    best_id: tl.tensor,
) -> Any:
    """The best of `best` and of the listed tokens that both cuts keep."""
    # The least key of top-k that is kept, and the last id of those with this key.
    k_key, k_id = _LEAST_KEY, NO_ID
    mass = bins.mass
    if row.top_k > 0:
        k_key, above, mass_above = _cut(
            listed, bins.k_bin, bins.k_bin, bins.k_count, row.top_k.to(tl.float64), False,
            _LEAST_KEY, NO_ID, sizes,
        )  # fmt: skip
        ties = row.top_k - above
        k_id = _last_id(listed, k_key, ties, sizes)
        mass = bins.k_mass + mass_above + ties * _mass_of(k_key)
    p_key, p_id = _LEAST_KEY, NO_ID
    if row.top_p < 1.0:
        needed = row.top_p * mass
        last_bin = tl.minimum(bins.last_p, bins.k_bin)
        p_key, above, _ = _cut(
            listed, bins.first, last_bin, bins.first_mass, needed, True, k_key, k_id, sizes
        )
        # The ones before it have less mass than is needed, and so it is kept.
        units = _mass_of(p_key).to(tl.float64)
        fits = (needed - above.to(tl.float64)) / tl.maximum(units, 1.0)
        ties = tl.where(units > 0, tl.ceil(fits), 2147483647.0).to(tl.int64)
        p_id = _last_id(listed, p_key, ties, sizes)
    for start in range(0, listed.count, sizes.LISTED):
        key, id, is_kept = _turn(listed, start, sizes)
        below = _of_key(key)
        is_kept &= (key > k_key) | ((key == k_key) & (id <= k_id))
        is_kept &= (key > p_key) | ((key == p_key) & (id <= p_id))
        is_kept &= tl.exp(below) >= row.min_p
        score = score_of(below, given.mixed, id, is_kept, row.key)
        best, best_id = better(best, best_id, tl.where(is_kept, score, -INFINITY), id)
    return best, best_id


@triton.jit  # type: ignore[untyped-decorator]
def key_of(below: tl.tensor) -> Any:
    """Integers in the order of the logits, none of which is above 0."""
    return -(below.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _of_key(key: tl.tensor) -> Any:
    return -((-key).to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _mass_of(key: tl.tensor) -> Any:
    return tl.sum(units_of(_of_key(tl.full([1], 0, tl.int32) + key)), 0)


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
    sizes: DrawSizes,
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
            bin = bin_of(below, sizes)
            is_one &= (key > middle) & (bin >= first_bin) & (bin <= last_bin)
            is_one &= (key > k_key) | ((key == k_key) & (id <= k_id))
            units = tl.sum(tl.where(is_one, units_of(below), 0), 0)
            mass += units
            total += units if BY_MASS else tl.sum(is_one.to(tl.int64), 0)
        if total.to(tl.float64) < needed:
            high, above, mass_above = middle, total, mass
        else:
            low = middle
    return high, above, mass_above


@triton.jit  # type: ignore[untyped-decorator]
def _last_id(listed: Listed, key: tl.tensor, number: tl.tensor, sizes: DrawSizes) -> Any:
    """The least id such that so many tokens with this key have it or a lower one."""
    low, high = listed.count * 0 - 1, listed.count * 0 + sizes.VOCABULARY
    while high - low > 1:
        middle = low + (high - low) // 2
        found = number * 0
        for start in range(0, listed.count, sizes.LISTED):
            own, id, is_one = _turn(listed, start, sizes)
            is_one &= (own == key) & (id <= middle)
            found += tl.sum(is_one.to(tl.int64), 0)
        if found >= number:
            high = middle
        else:
            low = middle
    return high
