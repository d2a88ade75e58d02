"""What a request does with its new tokens: text, grammar, and the end of the request."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.request import FinishReason, RequestOutput, TokenLogprobs
from pcomm.inference.engine.sampling.stopping import finish_reason
from pcomm.inference.text.text_stream import TextStream

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
        Exception: An error that the tokenizer or the grammar has raised.
    """
    prompt_logprobs = () if live.output else tuple(live.prompt_logprobs)
    text, reason, count = "", None, 0
    for token in tokens:
        live.tokens.append(token)
        live.output.append(token)
        count += 1
        reason = _end(live, token)
        if live.text is not None:
            more, reason = _follow(live.text, live, token, reason)
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


def _end(live: LiveRequest, token: int) -> FinishReason | None:
    """The reason for which a request ends with its newest token, text aside."""
    is_complete = False
    if live.grammar is not None:
        live.grammar.accept(token)
        is_complete = live.grammar.is_finished
    return finish_reason(
        live.params,
        live.stop_ids,
        token_id=token,
        num_output=len(live.output),
        room=live.limit - len(live.tokens),
        is_complete=is_complete,
    )


def _follow(
    stream: TextStream, live: LiveRequest, token: int, reason: FinishReason | None
) -> tuple[str, FinishReason | None]:
    """The text that a token makes certain, and the reason for which the request ends now."""
    text = ""
    # A token that ends the text by its id is no part of it.
    if token not in live.stop_ids:
        delta = stream.push(token)
        text, reason = delta.text, "stop" if delta.is_stopped else reason
    if reason and not stream.is_stopped:
        text += stream.flush()
        reason = "stop" if stream.is_stopped else reason
    return text, reason
