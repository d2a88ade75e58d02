"""The text of one request while it is written, in memory that grows with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pcomm.core import Group
from pcomm.inference import Engine, Request, TextStream, Tokenizer
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["TextPart", "stream"]

# Room for a short text, which is then computed in one piece. A multiple of the block.
_FIRST_TOKENS, _BLOCK = 1024, 16


@dataclass(frozen=True)
class TextPart:
    """What became certain with one more token.

    Attributes:
        token_ids: The token; none in a part that only ends the text.
        text: Text that no later token changes; may be empty.
        finish_reason: None until the text ends.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None


def stream(
    model: LanguageModel,
    tokenizer: Tokenizer,
    request: Request,
    *,
    group: Group | None = None,
    opened: Callable[[Engine], object] | None = None,
    batch_invariant: bool = False,
) -> Iterator[TextPart]:
    """Continue one prompt; local.

    Keys and values have room for the prompt and some text. When that is full, the text so far is
    computed again with twice the room: draws depend on the seed and on the place in the text, so
    the text goes on as it would have. Thus `max_tokens` may be larger than any memory.

    Args:
        model: The whole model, or this rank's part of it.
        tokenizer: Gives the text, and the tokens that end it.
        request: Prompt and settings.
        group: Ranks that share the model, and make the same calls; None for one process.
        opened: Called with each engine that computes a part of the text; None for nothing.
        batch_invariant: True to write with the bits of an `Engine` with it; the memory then has
            room for the whole text.

    Raises:
        ConfigError: The prompt or a setting cannot be used with this model.
    """
    params, written = request.params, 0
    text = TextStream(tokenizer, params.stop, min_tokens=params.min_tokens)
    tokens, room = list(request.prompt), len(request.prompt) + _FIRST_TOKENS
    is_told_apart = params.presence_penalty or params.frequency_penalty
    if is_told_apart or params.json_schema or params.regex or batch_invariant:
        # These tell what was written from the prompt.
        room = len(tokens) + params.max_tokens
    while True:
        left = params.max_tokens - written
        shorter = min(left, room - len(tokens))
        fewest = max(params.min_tokens - written, 0)
        part = replace(params, max_tokens=shorter, min_tokens=fewest, stop=())
        onwards = replace(request, prompt=tuple(tokens), params=part)
        engine = _engine_for(model, tokenizer.eos_ids, onwards, group, batch_invariant)
        if opened is not None:
            opened(engine)
        for token, reason in _tokens(engine, onwards):
            tokens.append(token)
            written += 1
            if reason == "stop":
                yield TextPart((token,), text.flush(), "stop")
                return
            delta = text.push(token)
            if delta.is_stopped:
                yield TextPart((token,), delta.text, "stop")
                return
            if written == params.max_tokens:
                rest = delta.text + text.flush()
                yield TextPart((token,), rest, "stop" if text.is_stopped else "length")
                return
            yield TextPart((token,), delta.text)
        room *= 2


def _engine_for(
    model: LanguageModel,
    eos_ids: Sequence[int],
    request: Request,
    group: Group | None,
    batch_invariant: bool,
) -> Engine:
    """An engine with room for one request."""
    length = len(request.prompt) + request.params.max_tokens
    return Engine(
        model,
        vocabulary=model.vocabulary.length,
        eos_ids=eos_ids,
        max_model_len=length,
        block_size=_BLOCK,
        num_blocks=-(-length // _BLOCK),
        num_state_slots=1,
        max_requests=1,
        prefix_cache=False,
        batch_invariant=batch_invariant,
        device=model.device,
        group=group,
    )


def _tokens(engine: Engine, request: Request) -> Iterator[tuple[int, str | None]]:
    """Tokens of one request, in an engine that ends with the iterator."""
    try:
        engine.add(request)
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                for token in output.token_ids:
                    yield token, output.finish_reason
    finally:
        engine.close()
