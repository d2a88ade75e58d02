"""Which tokens a draw is from: top-k, then top-p of those, then min-p."""

# Shape suffixes: R rows, V vocabulary, C candidates of a row.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.inference.engine.sampling.likeliest_tokens import (
    candidates,
    least_of_top,
    likeliest_first,
)
from pcomm.inference.engine.sampling.sampling_params import SamplingParams

__all__ = ["filter_tokens", "filters"]

# Probabilities are added as integers of this many per largest probability, because sums of integers
# do not depend on their order, so neither on the device nor on the other rows.
_UNITS = 2.0**30
# Up to so many candidates are sorted as they are; of more, those that top-p needs are found by so
# many halvings of the range of logits, to about a tenth of a logit.
_FEW, _HALVINGS = 256, 8


def filters(params: SamplingParams) -> bool:
    """Whether a draw with these settings is not from all tokens."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def filter_tokens(below_RV: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The tokens that the filters of each row keep, the likeliest first. Local.

    Top-k keeps exactly k tokens, of equal ones those with the lowest ids. Top-p keeps the fewest of
    the likeliest whose probabilities, among those that top-k kept, reach `top_p`. Min-p keeps those
    with at least `min_p` times the probability of the likeliest.

    Args:
        below_RV: fp32 logits, divided by the temperature, less the largest of the row.
        params: Settings of each row; a row without filters keeps all tokens.

    Returns:
        int64 ids `[R, C]` and their logits `[R, C]`, minus infinity for what is not kept.
    """
    device, vocabulary = below_RV.device, below_RV.shape[1]
    # fp64 on the host, as top_p is compared with exact sums.
    top_p_R = torch.tensor([one.top_p for one in params], dtype=torch.float64)
    min_p_R = torch.tensor([one.min_p for one in params], dtype=torch.float32)
    top_k_R = torch.tensor([min(one.top_k or vocabulary, vocabulary) for one in params])
    top_p_R, min_p_R, top_k_R = top_p_R.to(device), min_p_R.to(device), top_k_R.to(device)

    # A little less, for the rounding of the logarithm.
    least_R = min_p_R.log() - 1e-3
    if any(one.top_k for one in params):
        # Top-p needs the mass of all that top-k keeps, also of what min-p removes.
        top_R = least_of_top(below_RV, [one.top_k for one in params])
        least_R = torch.where(top_k_R < vocabulary, top_R, least_R)
    # The mass of all tokens matters where top-p is the first filter.
    total_R = torch.full_like(top_k_R, -1)
    first = [
        row for row, one in enumerate(params) if one.top_p < 1 and not 0 < one.top_k < vocabulary
    ]
    if first:
        rows = torch.tensor(first, device=device)
        mass = _units(below_RV if len(first) == len(params) else below_RV[rows]).sum(1)
        total_R[rows] = mass
        # Tokens below a V-th part of the mass that may go are together less than it. Half of that,
        # so that rounding keeps a token too many and never drops one.
        share = (1 - top_p_R[rows]) * mass / (2 * vocabulary * _UNITS)
        least_R[rows] = torch.maximum(least_R[rows], share.log().float())

    ids_RC, below_RC = candidates(below_RV, least_R)
    if first and below_RC.shape[1] > _FEW:
        # Sorting takes longer than finding a bound that few tokens of the mass reach.
        needed_R = torch.where(total_R < 0, torch.inf, top_p_R * total_R)
        places_RC, below_RC = candidates(below_RC, _least_with_mass(below_RC, needed_R))
        ids_RC = ids_RC.gather(1, places_RC)
    ids_RC, below_RC = likeliest_first(ids_RC, below_RC)
    rank_C = torch.arange(below_RC.shape[1], device=device)
    keep_RC = rank_C < top_k_R[:, None]
    units_RC = _units(below_RC).masked_fill_(~keep_RC, 0)
    before_RC = units_RC.cumsum(1) - units_RC
    total_R = torch.where(total_R < 0, units_RC.sum(1), total_R)
    reached_RC = before_RC.double() >= (top_p_R * total_R)[:, None]
    keep_RC &= ~reached_RC | (top_p_R == 1)[:, None]
    keep_RC &= below_RC.exp() >= min_p_R[:, None]
    return ids_RC, below_RC.masked_fill_(~keep_RC, -torch.inf)


def _least_with_mass(below_RC: Tensor, needed_R: Tensor) -> Tensor:
    """A logit for each row, above which its tokens have the mass that is needed, and little more.

    Args:
        below_RC: Logits less the largest one.
        needed_R: Units of mass, at most those of the row; infinity gives minus infinity.
    """
    units_RC = _units(below_RC)
    # Tokens below the first bound have no units at all.
    low_R = torch.full_like(below_RC[:, 0], math.log(0.25 / _UNITS))
    high_R = torch.zeros_like(low_R)
    for _ in range(_HALVINGS):
        middle_R = (low_R + high_R) / 2
        mass_R = units_RC.where(below_RC >= middle_R[:, None], 0).sum(1)
        is_enough_R = mass_R >= needed_R
        low_R = torch.where(is_enough_R, middle_R, low_R)
        high_R = torch.where(is_enough_R, high_R, middle_R)
    return low_R.masked_fill_(needed_R == torch.inf, -torch.inf)


def _units(below: Tensor) -> Tensor:
    return (below.exp() * _UNITS).round_().long()
