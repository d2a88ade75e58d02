"""What `LLM` returns: whole texts, and the parts of one while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.inference import RequestOutput
from pcomm.inference.engine import FinishReason, TokenLogprobs

__all__ = ["Delta", "Generation", "joined"]


@dataclass(frozen=True)
class Delta:
    """What became certain of a text with one step.

    Attributes:
        text: Text that no later token changes; may be empty.
        token_ids: Tokens of the step, an end token included.
        logprobs: One entry for each token, where the settings ask for them.
        finish_reason: None until the text ends.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Generation:
    """A text that has ended.

    Attributes:
        prompt_ids: Tokens that were continued.
        text: Text behind the prompt; without a stop string.
        token_ids: Tokens that were written; an end token, if one came, is the last.
        finish_reason: `stop`, `length`, `abort` (by `LLM.abort`) or `error`.
        logprobs: One entry for each written token, where the settings ask for them.
        prompt_logprobs: One entry for each token of the prompt but the first, likewise.
        cached_tokens: Number of tokens of the prompt that the prefix cache had.
        error: The exception that ended the text, with `finish_reason` `error`.
    """

    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    error: Exception | None = None


def joined(prompt: tuple[int, ...], outputs: Sequence[RequestOutput]) -> Generation:
    """All outputs of one request as one text. Local.

    Args:
        prompt: Tokens of its prompt.
        outputs: Outputs of the engine for it, in order; the last one has a `finish_reason`, unless
            the request was aborted.
    """
    last = outputs[-1] if outputs else None
    return Generation(
        prompt_ids=prompt,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=(last.finish_reason if last else None) or "abort",
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
        cached_tokens=max((output.cached_tokens for output in outputs), default=0),
        error=last.error if last else None,
    )
