"""Log-probabilities of the tokens that a prompt has."""

# Shape suffixes: L rows of logits, V token ids.

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.sampling.logprobs import token_logprobs
from pcomm.inference.engine.sampling.not_finite import not_finite

__all__ = ["PromptRows", "note_prompt_logprobs"]


@dataclass
class PromptRows:
    """Rows of logits that no token is sampled from.

    Attributes:
        places: Their numbers among the rows of the step.
        requests: The request of each.
    """

    places: list[int] = field(default_factory=list)
    requests: list[LiveRequest] = field(default_factory=list)

    def other_places(self, num_rows: int) -> list[int]:
        """The rows that tokens are sampled from."""
        return sorted(set(range(num_rows)) - set(self.places))


def note_prompt_logprobs(logits_LV: Tensor, rows: PromptRows) -> None:
    """Append to each request the log-probabilities of its next known tokens.

    Logits that are no numbers give it an error instead, which ends it.

    Args:
        logits_LV: All logits of the step.
        rows: Places of those that are of prompts.
    """
    chosen, asked = [], []
    counts: dict[str, int] = {}
    for live in rows.requests:
        # The first row of a request is that of the first token, which gives the second one.
        number = counts.get(live.request_id, len(live.prompt_logprobs)) + 1
        counts[live.request_id] = number
        chosen.append(live.prompt[number])
        asked.append(live.params.prompt_logprobs or 0)
    taken = logits_LV[torch.tensor(rows.places, device=logits_LV.device)]
    for live, entry in zip(rows.requests, token_logprobs(taken, chosen, asked), strict=True):
        live.prompt_logprobs.append(entry)
        # A logit that is NaN or infinite, or minus infinity in all, makes all of these NaN.
        if math.isnan(entry.logprob) and live.error is None:
            live.error = not_finite(entry.logprob)
