"""The rows of logits of a step that a token is sampled from."""

from __future__ import annotations

from array import array

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.prompt_logprobs import PromptRows
from pcomm.inference.engine.sampling_row import SamplingRow
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
    return SamplingRow(
        live.params, live.prompt, live.output, len(live.tokens), live.stop_ids, live.grammar
    )


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
