"""What a request does with its new tokens: text, grammar, and the end of the request."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.request import FinishReason, RequestOutput, TokenLogprobs
from pcomm.inference.engine.stopping import finish_reason

__all__ = ["accept_tokens"]


def accept_tokens(
    live: LiveRequest, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> RequestOutput:
    """Append tokens to a request until it ends.

    Args:
        live: Request that goes on.
        tokens: Its next tokens, at least one; those behind its end are dropped.
        logprobs: Log-probabilities of each, where the request asked for them.

    Returns:
        What the engine says of the request; with a `finish_reason` if it has ended.

    Raises:
        Exception: Of the tokenizer or the grammar.
    """
    prompt_logprobs = () if live.output else tuple(live.prompt_logprobs)
    text, reason, count = "", None, 0
    for token in tokens:
        live.tokens.append(token)
        live.output.append(token)
        count += 1
        if token in live.stop_ids or len(live.tokens) >= live.limit:
            room = live.limit - len(live.tokens)
            reason = finish_reason(live.params, live.stop_ids, token, len(live.output), room)
        if live.text is not None or live.grammar is not None:
            more, reason = _follow(live, token, reason)
            text += more
        if reason:
            break
    return RequestOutput(
        request_id=live.request_id,
        token_ids=tuple(tokens[:count]),
        text=text,
        finish_reason=reason,
        logprobs=tuple([entry for entry in logprobs[:count] if entry is not None]),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=live.cached_tokens or 0,
    )


def _follow(
    live: LiveRequest, token: int, reason: FinishReason | None
) -> tuple[str, FinishReason | None]:
    """The text that a token makes certain, and the reason for which the request ends now."""
    if live.grammar is not None and reason != "stop":
        live.grammar.accept(token)
        if live.grammar.is_finished:
            reason = reason or "stop"
    if live.text is None:
        return "", reason
    text = ""
    # A token that ends the text by its id is no part of it.
    if token not in live.stop_ids:
        delta = live.text.push(token)
        text, reason = delta.text, "stop" if delta.is_stopped else reason
    if reason and not live.text.is_stopped:
        text += live.text.flush()
        reason = "stop" if live.text.is_stopped else reason
    return text, reason
