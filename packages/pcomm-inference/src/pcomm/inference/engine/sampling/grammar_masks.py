"""Tokens that a grammar forbids, for all rows that have one."""

# Shape suffixes: R rows, V vocabulary, G rows with a grammar, W words of 32 bits.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.inference.engine.sampling.sampling_row import SamplingRow

__all__ = ["mask_by_grammar"]

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
        if row.grammar is not None:
            allowed = row.grammar.allowed_words()
            if len(row.output) < row.params.min_tokens:
                allowed = _without(allowed, row.stop_ids)
            words.append(allowed)
            numbers.append(number)
    if not words:
        return
    device, vocabulary = logits_RV.device, logits_RV.shape[1]
    words_GW = torch.stack(words).to(device)
    bits = torch.arange(_BITS, dtype=torch.int32, device=device)
    forbidden_GV = ((words_GW[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocabulary]
    if len(numbers) == len(rows):
        logits_RV.masked_fill_(forbidden_GV, -torch.inf)
    else:
        chosen = torch.tensor(numbers, device=device)
        logits_RV[chosen] = logits_RV[chosen].masked_fill_(forbidden_GV, -torch.inf)


def _without(words_W: Tensor, ids: Sequence[int]) -> Tensor:
    left_W = words_W.clone()
    for token_id in ids:
        word, bit = divmod(token_id, _BITS)
        left_W[word] &= ~torch.tensor(1, dtype=torch.int32).bitwise_left_shift_(bit)
    return left_W if left_W.any() else words_W
