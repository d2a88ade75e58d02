"""Which tokens may be drawn: edits of single logits, masks of grammars, top-k, top-p, min-p."""

# Shape suffixes: R rows, V vocabulary, E edits, G rows with a grammar, W words of 32 bits, C
# candidates of a row.

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.inference.sampling.params import SamplingParams, SamplingRow
from pcomm.inference.upload import upload

__all__ = [
    "UNITS",
    "Edits",
    "candidates",
    "edit_logits",
    "filter_tokens",
    "has_edits",
    "has_filters",
    "least_of_top",
    "likeliest_first",
    "logit_edits",
    "mask_by_grammar",
]


def has_edits(params: SamplingParams) -> bool:
    """Whether a request with these settings may have logits edited."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.min_tokens > 0
        or bool(params.logit_bias)
    )


class Edits(NamedTuple):
    """Edits of one kind, on the host: indices into the flat logits, row by row, and a number each.

    An index that occurs several times has the same number each time.
    """

    places_E: Tensor
    values_E: Tensor


def logit_edits(rows: Sequence[SamplingRow], vocabulary: int) -> tuple[Edits, ...]:
    """What `edit_logits` does with rows, in the order in which it is done. Local.

    Args:
        rows: Rows, in the order of the logits.
        vocabulary: Number of logits of a row.

    Returns:
        What positive logits are divided by, and others multiplied with; what is subtracted; what
        is added; and places that become minus infinity, each of which has zero.
    """
    return (
        _repetition(rows, vocabulary),
        _presence_and_frequency(rows, vocabulary),
        _edits(
            (number * vocabulary + token_id, bias)
            for number, row in enumerate(rows)
            for token_id, bias in row.params.logit_bias.items()
        ),
        _edits(
            (number * vocabulary + token_id, 0.0)
            for number, row in enumerate(rows)
            if row.allowed_words is None and len(row.output) < row.params.min_tokens
            for token_id in row.stop_ids
        ),
    )


def edit_logits(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Edit the logits of each row in place: penalties, then biases, then stop tokens. Local.

    The repetition penalty divides positive logits and multiplies the others, for tokens of prompt
    and output. Presence and frequency penalties are subtracted for tokens of the output, the second
    as often as it has the token. A bias is added to what these leave. Stop tokens become minus
    infinity while the output is shorter than `min_tokens`; where a grammar holds, it decides that.

    Args:
        logits_RV: fp32 and contiguous.
        rows: Rows, in the order of the logits.
    """
    flat = logits_RV.view(-1)
    penalised, lowered, raised, forbidden = (
        Edits(*(one.to(flat.device) for one in edits))
        for edits in logit_edits(rows, logits_RV.shape[1])
    )
    if len(penalised.places_E):
        places, factors = penalised
        found = flat[places]
        # A token that occurs several times is written several times, each with the same value.
        flat[places] = torch.where(found > 0, found / factors, found * factors)
    if len(lowered.places_E):
        flat[lowered.places_E] = flat[lowered.places_E] - lowered.values_E
    if len(raised.places_E):
        flat[raised.places_E] = flat[raised.places_E] + raised.values_E
    if len(forbidden.places_E):
        flat[forbidden.places_E] = -torch.inf


def _edits(found: Iterable[tuple[int, float]]) -> Edits:
    pairs = list(found)
    return Edits(
        torch.tensor([place for place, _ in pairs], dtype=torch.int64),
        torch.tensor([value for _, value in pairs], dtype=torch.float32),
    )


def _repetition(rows: Sequence[SamplingRow], vocabulary: int) -> Edits:
    chosen = [n for n, row in enumerate(rows) if row.params.repetition_penalty != 1]
    if not chosen:
        return _edits(())
    texts = [(n, ids) for n in chosen for ids in (rows[n].prompt, rows[n].output)]
    places, lengths = _places(texts, vocabulary)
    penalties = torch.tensor([rows[n].params.repetition_penalty for n, _ in texts])
    return Edits(places, penalties.repeat_interleave(lengths))


def _presence_and_frequency(rows: Sequence[SamplingRow], vocabulary: int) -> Edits:
    chosen = [
        n
        for n, row in enumerate(rows)
        if row.params.presence_penalty != 0 or row.params.frequency_penalty != 0
    ]
    if not chosen:
        return _edits(())
    places, _ = _places([(n, rows[n].output) for n in chosen], vocabulary)
    # Each place stands once in the list.
    places, counts = places.unique(return_counts=True)
    # fp64 for the product; the logit is fp32 again.
    settings = torch.zeros(2, len(rows), dtype=torch.float64)
    settings[:, chosen] = torch.tensor(
        [[p.presence_penalty, p.frequency_penalty] for p in (rows[n].params for n in chosen)],
        dtype=torch.float64,
    ).T
    presence, frequency = settings[:, places // vocabulary]
    return Edits(places, (presence + frequency * counts).float())


def _places(texts: Iterable[tuple[int, Sequence[int]]], vocabulary: int) -> tuple[Tensor, Tensor]:
    """int64 `[E]` indices into the flat logits, and how many of them each text has."""
    parts = [_as_tensor(ids) + number * vocabulary for number, ids in texts]
    return torch.cat(parts), torch.tensor([len(part) for part in parts])


def _as_tensor(ids: Sequence[int]) -> Tensor:
    if isinstance(ids, array) and ids and ids.typecode == "q":
        # No copy; the caller adds to it, and the view is gone when it returns.
        return torch.frombuffer(ids, dtype=torch.int64)
    return torch.tensor(ids, dtype=torch.int64)


_BITS = 32


def mask_by_grammar(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set the logits of tokens that the grammars of `rows` forbid to minus infinity, in place.

    Before `min_tokens`, stop tokens are forbidden, too, unless the grammar allows nothing else.

    Args:
        logits_RV: Logits of all rows.
        rows: Rows, in the order of the logits.
    """
    words, numbers = [], []
    for number, row in enumerate(rows):
        allowed = None if row.allowed_words is None else row.allowed_words()
        if allowed is not None:
            if len(row.output) < row.params.min_tokens:
                allowed = _without(allowed, row.stop_ids)
            words.append(allowed)
            numbers.append(number)
    if not words:
        return
    device, vocabulary = logits_RV.device, logits_RV.shape[1]
    # A copy of its own: what grammars allow is found while the device runs the model.
    told = [torch.tensor(numbers, dtype=torch.int32), torch.cat(words)]
    numbers_G, words_GW = upload(told, device)
    bits = torch.arange(_BITS, dtype=torch.int32, device=device)
    forbidden_GV = ((words_GW.view(len(words), -1, 1) >> bits) & 1 == 0).flatten(1)[:, :vocabulary]
    if len(numbers) == len(rows):
        logits_RV.masked_fill_(forbidden_GV, -torch.inf)
    else:
        logits_RV[numbers_G] = logits_RV[numbers_G].masked_fill_(forbidden_GV, -torch.inf)


def _without(words_W: Tensor, ids: Sequence[int]) -> Tensor:
    left_W = words_W.clone()
    for token_id in ids:
        word, bit = divmod(token_id, _BITS)
        left_W[word] &= ~torch.tensor(1, dtype=torch.int32).bitwise_left_shift_(bit)
    return left_W if left_W.any() else words_W


# Probabilities are added as integers of this many per largest probability, because sums of integers
# do not depend on their order, so neither on the device nor on the other rows.
UNITS = 2.0**30
# Up to so many candidates are sorted as they are; of more, those that top-p needs are found by so
# many halvings of the range of logits, to about a tenth of a logit.
_FEW, _HALVINGS = 256, 8


def has_filters(params: SamplingParams) -> bool:
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
        share = (1 - top_p_R[rows]) * mass / (2 * vocabulary * UNITS)
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
    low_R = torch.full_like(below_RC[:, 0], math.log(0.25 / UNITS))
    high_R = torch.zeros_like(low_R)
    for _ in range(_HALVINGS):
        middle_R = (low_R + high_R) / 2
        mass_R = units_RC.where(below_RC >= middle_R[:, None], 0).sum(1)
        is_enough_R = mass_R >= needed_R
        low_R = torch.where(is_enough_R, middle_R, low_R)
        high_R = torch.where(is_enough_R, high_R, middle_R)
    return low_R.masked_fill_(needed_R == torch.inf, -torch.inf)


def _units(below: Tensor) -> Tensor:
    return (below.exp() * UNITS).round_().long()


# Tokens of which only the largest logit is looked at in a first pass, at most; and blocks for each
# token that is wanted, at least, so that few others come along.
_LARGEST_BLOCK, _BLOCKS_PER_TOKEN = 64, 8


def least_of_top(x_RV: Tensor, numbers: Sequence[int]) -> Tensor:
    """`[R]`, for each row a number that at least so many of its tokens reach. Local.

    The maxima of blocks of tokens are tokens, too: as many of the row reach the k-th largest
    maximum. So all but one read of the logits is on a fraction of them.

    Args:
        x_RV: Logits.
        numbers: Number of tokens wanted of each row; all of them where it is 0.
    """
    vocabulary = x_RV.shape[1]
    wanted = [min(number, vocabulary) for number in numbers]
    block = min(vocabulary // (_BLOCKS_PER_TOKEN * max(wanted)), _LARGEST_BLOCK)
    if block > 1:
        # Tokens behind the last whole block may only raise the bound, which stays one.
        whole = vocabulary // block * block
        x_RV = x_RV[:, :whole].unflatten(1, (-1, block)).amax(-1)
    top_RK = x_RV.topk(max(wanted)).values
    last_R = torch.tensor([max(number - 1, 0) for number in wanted], device=x_RV.device)
    all_R = torch.tensor([number == 0 for number in wanted], device=x_RV.device)
    least_R = top_RK.gather(1, last_R[:, None])[:, 0]
    return least_R.masked_fill_(all_R, -torch.inf)


def candidates(x_RV: Tensor, least_R: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each row that reach its bound, in the order of their ids. Local.

    Args:
        x_RV: Logits; minus infinity for tokens that are not there.
        least_R: Least logit of a candidate.

    Returns:
        int64 ids `[R, C]` and their logits `[R, C]`, C that of the row with most of them, and at
        least 1. Behind the last candidate of a row stand id 0 and minus infinity.
    """
    keep_RV = x_RV >= least_R[:, None].clamp(min=torch.finfo(x_RV.dtype).min)
    counts_R = keep_RV.sum(1)
    size = (len(x_RV), max(int(counts_R.max()), 1))
    rows, ids = keep_RV.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=rows.device) - (counts_R.cumsum(0) - counts_R)[rows]
    ids_RC = torch.zeros(size, dtype=torch.int64, device=x_RV.device)
    ids_RC[rows, places] = ids
    x_RC = torch.full(size, -torch.inf, dtype=x_RV.dtype, device=x_RV.device)
    x_RC[rows, places] = x_RV[rows, ids]
    return ids_RC, x_RC


def likeliest_first(ids_RC: Tensor, x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates sorted by their logits, equal ones by their ids. Local.

    Args:
        ids_RC: Token ids, ascending in each row up to its last candidate.
        x_RC: Logits of the candidates; minus infinity behind the last one.
    """
    # Ids ascend, and a stable sort keeps their order among equals.
    x_RC, order_RC = x_RC.sort(dim=1, descending=True, stable=True)
    return ids_RC.gather(1, order_RC), x_RC
