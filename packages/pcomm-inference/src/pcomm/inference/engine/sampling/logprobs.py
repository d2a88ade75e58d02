"""Log-probabilities of tokens, from the logits that the model gave."""

# Shape suffixes: R rows, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.inference.engine.request import TokenLogprobs
from pcomm.inference.engine.sampling.likeliest_tokens import (
    candidates,
    least_of_top,
    likeliest_first,
)

__all__ = ["token_logprobs"]

# Rows are taken in blocks of so many numbers, which bounds the memory that a long prompt needs.
_BLOCK = 2**24


def token_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probability of one token of each row, and those of the likeliest. Local.

    Args:
        logits_RV: Logits of any floating-point dtype, as the model gave them; not changed.
        token_ids: Token of each row: the one that was sampled, or the next one of a prompt.
        num_top: Number of likeliest tokens wanted of each row, may be 0.
    """
    rows = max(_BLOCK // logits_RV.shape[1], 1)
    found: list[TokenLogprobs] = []
    for begin in range(0, len(token_ids), rows):
        part = slice(begin, begin + rows)
        found += _of_block(logits_RV[part], token_ids[part], num_top[part])
    return found


def _of_block(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    logprobs_RV = torch.log_softmax(logits_RV.float(), -1)
    ids_R1 = torch.tensor(token_ids, device=logprobs_RV.device)[:, None]
    chosen = logprobs_RV.gather(1, ids_R1)[:, 0].tolist()
    most = max(num_top)
    if most == 0:
        return [TokenLogprobs(*pair, {}) for pair in zip(token_ids, chosen, strict=True)]
    least_R = least_of_top(logprobs_RV, [most] * len(token_ids))
    sorted_RC = likeliest_first(*candidates(logprobs_RV, least_R))
    top_ids, top = (found_RC[:, :most].tolist() for found_RC in sorted_RC)
    return [
        TokenLogprobs(token_id, logprob, dict(zip(ids[:number], values[:number], strict=True)))
        for token_id, logprob, ids, values, number in zip(
            token_ids, chosen, top_ids, top, num_top, strict=True
        )
    ]
