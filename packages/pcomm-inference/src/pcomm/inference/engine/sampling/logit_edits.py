"""Penalties, biases and stop tokens that must not come yet, as edits of single logits."""

# Shape suffixes: R rows, V vocabulary, E edits.

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pcomm.inference.engine.sampling.sampling_params import SamplingParams
from pcomm.inference.engine.sampling.sampling_row import SamplingRow

__all__ = ["edit_logits", "edits"]


def edits(params: SamplingParams) -> bool:
    """Whether a request with these settings may have logits edited."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.min_tokens > 0
        or bool(params.logit_bias)
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
    vocabulary = logits_RV.shape[1]
    _repetition(flat, rows, vocabulary)
    _presence_and_frequency(flat, rows, vocabulary)
    _biases(flat, rows, vocabulary)
    too_early = [
        number * vocabulary + token_id
        for number, row in enumerate(rows)
        if row.grammar is None and len(row.output) < row.params.min_tokens
        for token_id in row.stop_ids
    ]
    if too_early:
        flat[torch.tensor(too_early, device=flat.device)] = -torch.inf


def _repetition(flat: Tensor, rows: Sequence[SamplingRow], vocabulary: int) -> None:
    chosen = [n for n, row in enumerate(rows) if row.params.repetition_penalty != 1]
    if not chosen:
        return
    texts = [(n, ids) for n in chosen for ids in (rows[n].prompt, rows[n].output)]
    places, lengths = _places(texts, vocabulary)
    penalties = torch.tensor([rows[n].params.repetition_penalty for n, _ in texts])
    factors = penalties.repeat_interleave(lengths).to(flat.device)
    places = places.to(flat.device)
    found = flat[places]
    # A token that occurs several times is written several times, each time with the same value.
    flat[places] = torch.where(found > 0, found / factors, found * factors)


def _presence_and_frequency(flat: Tensor, rows: Sequence[SamplingRow], vocabulary: int) -> None:
    chosen = [
        n
        for n, row in enumerate(rows)
        if row.params.presence_penalty != 0 or row.params.frequency_penalty != 0
    ]
    if not chosen:
        return
    places, _ = _places([(n, rows[n].output) for n in chosen], vocabulary)
    places, counts = places.unique(return_counts=True)
    # fp64 for the product; the logit is fp32 again.
    settings = torch.zeros(2, len(rows), dtype=torch.float64)
    settings[:, chosen] = torch.tensor(
        [[p.presence_penalty, p.frequency_penalty] for p in (rows[n].params for n in chosen)],
        dtype=torch.float64,
    ).T
    presence, frequency = settings[:, places // vocabulary]
    penalties = (presence + frequency * counts).float()
    # Each place stands once in the list.
    places = places.to(flat.device)
    flat[places] = flat[places] - penalties.to(flat.device)


def _biases(flat: Tensor, rows: Sequence[SamplingRow], vocabulary: int) -> None:
    found = [
        (number * vocabulary + token_id, bias)
        for number, row in enumerate(rows)
        for token_id, bias in row.params.logit_bias.items()
    ]
    if found:
        places = torch.tensor([place for place, _ in found], device=flat.device)
        biases = torch.tensor([bias for _, bias in found], device=flat.device)
        flat[places] = flat[places] + biases


def _places(texts: Iterable[tuple[int, Sequence[int]]], vocabulary: int) -> tuple[Tensor, Tensor]:
    """int64 `[E]` indices into the flat logits, and how many of them each text has."""
    parts = [_as_tensor(ids) + number * vocabulary for number, ids in texts]
    return torch.cat(parts), torch.tensor([len(part) for part in parts])


def _as_tensor(ids: Sequence[int]) -> Tensor:
    if isinstance(ids, array) and ids and ids.typecode == "q":
        # No copy; the caller adds to it, and the view is gone when it returns.
        return torch.frombuffer(ids, dtype=torch.int64)
    return torch.tensor(ids, dtype=torch.int64)
