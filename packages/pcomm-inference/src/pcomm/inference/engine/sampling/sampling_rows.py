"""The rows of logits of a step that a token is sampled from."""

from __future__ import annotations

from array import array

from torch import Tensor

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.sampling.prompt_logprobs import PromptRows
from pcomm.inference.engine.sampling.sampling_row import GrammarState, SamplingRow
from pcomm.inference.engine.step_plan import Chunk, StepPlan

__all__ = ["sampling_rows"]


def sampling_rows(plan: StepPlan) -> tuple[list[SamplingRow], PromptRows]:
    """What the sampler gets for each row that continues a text.

    Returns:
        The rows in the order of the logits, and all other rows, which are of prompts.
    """
    rows = [_row(live) for live in plan.decodes]
    of_prompts = PromptRows()
    place = len(rows)
    for chunk in plan.chunks:
        wanted = len(chunk.logits_rows())
        sampled = len(chunk.drafts) + 1 if chunk.is_sampled else 0
        of_prompts.places += range(place, place + wanted - sampled)
        of_prompts.requests += [chunk.live] * (wanted - sampled)
        place += wanted
        if sampled:
            rows += _draft_rows(chunk)
    return rows, of_prompts


def _row(live: LiveRequest) -> SamplingRow:
    mask = None if live.grammar is None else _mask(live, live.grammar)
    return SamplingRow(live.params, live.prompt, live.output, len(live.tokens), live.stop_ids, mask)


def _mask(live: LiveRequest, grammar: GrammarState) -> GrammarState | None:
    """The grammar with its mask computed; an error is noted, so that other rows are sampled."""
    try:
        return ComputedMask(grammar, grammar.allowed_words())
    except Exception as error:
        live.error = error
        return None


class ComputedMask:
    """A grammar whose mask is known.

    Args:
        grammar: The grammar.
        words: Its mask.
    """

    def __init__(self, grammar: GrammarState, words: Tensor) -> None:
        self._grammar = grammar
        self._words = words

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete."""
        return self._grammar.is_finished

    def allowed_words(self) -> Tensor:
        """The mask."""
        return self._words

    def accept(self, token_id: int) -> None:
        """Go on behind a token."""
        self._grammar.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        self._grammar.rollback(num_tokens)


def _draft_rows(chunk: Chunk) -> list[SamplingRow]:
    """A row behind the known tokens, and one behind each draft as if those before were right."""
    live = chunk.live
    rows = [_row(live)]
    output = array("q", live.output)
    for number, draft in enumerate(chunk.drafts, start=1):
        output.append(draft)
        position = len(live.tokens) + number
        rows.append(SamplingRow(live.params, live.prompt, output[:], position, live.stop_ids))
    return rows
