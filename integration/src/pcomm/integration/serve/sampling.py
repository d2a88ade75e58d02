"""From the fields of a request to the engine's settings."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcomm.inference import SamplingParams
from pcomm.integration.llm.generation_defaults import GenerationDefaults
from pcomm.integration.serve.api_error import ApiError, no_such_model
from pcomm.integration.serve.request_bodies import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    RequestFields,
    StructuredOutputs,
)
from pcomm.integration.serve.tools.call_format import lark_words
from pcomm.integration.serve.tools.tool_use import ToolUse

__all__ = [
    "RequestGrammar",
    "chat_params",
    "check_model",
    "check_prompt_ids",
    "completion_params",
    "request_grammar",
    "room_for",
]

# As in the OpenAI API, where completions are short unless more is asked for.
_COMPLETION_TOKENS = 16
_SEEDS = 2**63
# Fields that are settings as they are.
_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "stop_token_ids"),
)


def check_model(fields: RequestFields, name: str) -> None:
    """Refuse a request for another model, or one whose fields do not fit together. Local.

    Raises:
        ApiError: 404 for another model, otherwise 400.
    """
    if fields.model != name:
        raise no_such_model(fields.model, name)
    if fields.stream_options is not None and not fields.stream:
        raise _invalid("stream_options", "stream_options is for requests with stream=true.")


def room_for(prompt: Sequence[int], max_model_len: int, param: str) -> int:
    """Number of tokens that may follow a prompt, at least 1. Local.

    Args:
        prompt: Tokens of the prompt.
        max_model_len: Most tokens of prompt and text.
        param: Field that has the prompt.

    Raises:
        ApiError: There is no room.
    """
    room = max_model_len - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"The context of this model has {max_model_len} tokens, and the prompt has "
            f"{len(prompt)}. Shorten it to at most {max_model_len - 1}.",
            param=param,
            code="context_length_exceeded",
        )
    return room


def check_prompt_ids(prompt: Sequence[int], vocabulary: int) -> None:
    """Refuse token ids that the model does not have. Local.

    Args:
        prompt: Token ids that a client has sent, none below 0.
        vocabulary: Number of token ids of the model.

    Raises:
        ApiError: A token id is not below `vocabulary`.
    """
    wrong = [token for token in prompt if token >= vocabulary]
    if wrong:
        known = f"this model has the token ids 0 to {vocabulary - 1}"
        raise _invalid("prompt", f"prompt: {known}, and not {wrong[0]}.")


@dataclass(frozen=True)
class RequestGrammar:
    """What the texts of a request follow.

    Attributes:
        param: Field of the request that asks for it.
        settings: The one field of `SamplingParams` for it; empty for any text.
    """

    param: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


def request_grammar(request: RequestFields, tools: ToolUse | None = None) -> RequestGrammar:
    """What the texts of a request follow. Local.

    Args:
        request: The fields.
        tools: Tools of the request; None for a request without them.

    Raises:
        ApiError: It asks for two grammars, or `structured_outputs` has not exactly one field.
    """
    form = request.response_format if isinstance(request, ChatRequest) else None
    answer: dict[str, Any] | None = None
    if isinstance(form, JsonSchemaFormat):
        answer = form.json_schema.schema_
    elif isinstance(form, JsonObjectFormat):
        answer = {"type": "object"}
    if request.structured_outputs is not None:
        found = _structured(request.structured_outputs)
        if answer is not None or (tools is not None and tools.descriptions):
            other = "tools" if answer is None else "response_format"
            raise _invalid(
                "structured_outputs", f"A text cannot follow both structured_outputs and {other}."
            )
        return found
    if tools is not None and (grammar := tools.grammar(answer)) is not None:
        return RequestGrammar("tools", {"grammar": grammar})
    if answer is not None:
        return RequestGrammar("response_format", {"json_schema": json.dumps(answer)})
    return RequestGrammar()


def _structured(fields: StructuredOutputs) -> RequestGrammar:
    every = fields.model_dump(by_alias=True)
    given = {name: value for name, value in every.items() if value not in (None, False)}
    if len(given) != 1:
        raise _invalid(
            "structured_outputs",
            "structured_outputs has exactly one of json, json_object, regex, choice, grammar; "
            f"{', '.join(given) or 'none'} was given.",
        )
    ((name, value),) = given.items()
    setting, text = name, value
    if name == "json":
        setting, text = "json_schema", value if isinstance(value, str) else json.dumps(value)
    elif name == "json_object":
        setting, text = "json_schema", '{"type": "object"}'
    elif name == "choice":
        setting, text = "grammar", f"start: ANY\nANY: {' | '.join(map(lark_words, value))}"
    return RequestGrammar(f"structured_outputs.{name}", {setting: text})


def completion_params(
    request: CompletionRequest, room: int, grammar: RequestGrammar, defaults: GenerationDefaults
) -> list[SamplingParams]:
    """Settings of each of the `n` texts of one prompt. Local.

    Args:
        request: The fields.
        room: Most tokens that may follow the prompt.
        grammar: Grammar that binds the texts.
        defaults: Settings for the fields that it has not.

    Raises:
        ApiError: `max_tokens` of 0 without `echo`.
        PcommError: A value cannot be used.
    """
    limit = request.max_tokens
    if limit == 0 and not request.echo:
        raise _invalid("max_tokens", "max_tokens of 0 is for requests with echo=true.")
    if limit is None:
        limit = defaults.fields.get("max_tokens", _COMPLETION_TOKENS)
    # The engine gives the log-probabilities of a prompt with the first token behind it.
    limit = min(max(limit, 1), room)
    return _params(
        request,
        limit,
        grammar,
        defaults,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def chat_params(
    request: ChatRequest,
    room: int,
    grammar: RequestGrammar,
    stop: tuple[str, ...],
    defaults: GenerationDefaults,
) -> list[SamplingParams]:
    """Settings of each of the `n` answers. Local.

    Args:
        request: The fields.
        room: Most tokens that may follow the conversation.
        grammar: Grammar that binds the answers.
        stop: Strings that end an answer of this model beside those that are asked for.
        defaults: Settings for the fields that it has not.

    Raises:
        ApiError: `top_logprobs` without `logprobs`, or two different limits of tokens.
        PcommError: A value cannot be used.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise _invalid("top_logprobs", "top_logprobs is for requests with logprobs=true.")
    limits = {request.max_completion_tokens, request.max_tokens} - {None}
    if len(limits) > 1:
        raise _invalid(
            "max_tokens",
            "max_tokens is the older name of max_completion_tokens; with different values it is "
            "not clear which one is meant. Send one of them.",
        )
    limit = request.max_completion_tokens or request.max_tokens
    return _params(
        request,
        min(limit or defaults.fields.get("max_tokens", room), room),
        grammar,
        defaults,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        more_stop=stop,
    )


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _params(
    fields: RequestFields,
    max_tokens: int,
    grammar: RequestGrammar,
    defaults: GenerationDefaults,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    more_stop: tuple[str, ...] = (),
) -> list[SamplingParams]:
    given = {name: getattr(fields, name) for name in _SAME_NAMES}
    given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs, **grammar.settings}
    stop = defaults.fields.get("stop", ()) if fields.stop is None else fields.stop
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    settings: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
    settings |= {
        "max_tokens": max_tokens,
        "stop": stop + tuple(text for text in more_stop if text not in stop),
        "logit_bias": {int(token): bias for token, bias in (fields.logit_bias or {}).items()},
    }
    if fields.min_tokens is not None:
        settings["min_tokens"] = min(fields.min_tokens, max_tokens)
    # Without a seed each request is drawn anew, and each of its texts is another one.
    seed = secrets.randbelow(_SEEDS) if fields.seed is None else fields.seed
    return [
        defaults.params(settings | {"seed": (seed + place) % _SEEDS})
        for place in range(fields.n or 1)
    ]
