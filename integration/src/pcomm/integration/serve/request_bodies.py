"""The bodies of requests, and what is said of those that are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pcomm.core.errors import near_misses
from pcomm.integration.serve.api_error import ApiError

__all__ = [
    "MOST_CHOICES",
    "AnyMessage",
    "AssistantMessage",
    "ChatRequest",
    "CompletionRequest",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "NamedTool",
    "RequestFields",
    "StructuredOutputs",
    "ToolMessage",
    "unreadable_body",
    "validation_error",
]


MOST_CHOICES = 128
"""Most texts of one HTTP request, as in the OpenAI API."""

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Fields(BaseModel):
    """JSON of exactly these fields, without conversions such as of `"1"` to 1."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Fields):
    """What a stream has beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Fields):
    """A JSON schema; `name` and `description` have no effect."""

    name: str
    description: str | None = None
    # Not named `schema`: pydantic's models have a method of that name.
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Fields):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Fields):
    """What the text follows, by exactly one field; names and meanings are vLLM's."""

    # Not named `json`: pydantic's models have a method of that name.
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None


class RequestFields(Fields):
    """How tokens are drawn and when a text ends; null is the same as a field that is absent.

    `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids` and `ignore_eos` are not
    OpenAI's; they are those of `SamplingParams`, and the names that other servers use, as is
    `structured_outputs`. `user`, `safety_identifier` and `prompt_cache_key` have no effect.
    """

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=128)] | None = (
        None
    )
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None


Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""A list of what is not supported: clients send an empty one for none."""


class TextPart(Fields):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class Message(Fields):
    """What the system or the user says; pictures are not supported."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class CalledFunction(Fields):
    """A function that the model has called, and the JSON of its arguments."""

    name: str
    arguments: str


class MessageCall(Fields):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Fields):
    """An answer of the model, as clients keep it, with null for what it has not."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: list[MessageCall] | None = None


class ToolMessage(Fields):
    """What a function has returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


AnyMessage = Annotated[Message | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionFields(Fields):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionFields


class FunctionName(Fields):
    """A function by its name."""

    name: str


class NamedTool(Fields):
    """The tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(RequestFields):
    """Answer a conversation, `n` times.

    The fields from `store` on take the values that ask for nothing, as clients send them by
    default; `metadata` has no effect with any value. `chat_template_kwargs` are variables for the
    template of the model, as vLLM has them.
    """

    messages: Annotated[list[AnyMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    functions: Nothing = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(RequestFields):
    """Continue one prompt or several, each `n` times; with `echo` also by no token.

    `best_of` and `suffix` take the values that ask for nothing.
    """

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[int(token) for token in prompt]]
        return list(prompt)


_UNSUPPORTED = frozenset(
    (
        *("audio", "best_of", "function_call", "functions", "modalities", "moderation"),
        *("prediction", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"),
        *("service_tier", "store", "suffix", "verbosity", "web_search_options"),
    )
)
"""Fields of the OpenAI API that this server refuses, unless their value changes nothing."""

_KINDS = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
"""Words for the JSON that is no object; any other is a number."""

_REQUESTS: dict[str, type[RequestFields]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


def validation_error(
    errors: Sequence[Mapping[str, Any]], *, body: Any, path: str, content_type: str | None
) -> ApiError:
    """The answer to a body that is no request. Local.

    Args:
        errors: Errors that pydantic and FastAPI have found, at least one.
        body: The body as JSON was read from it; the bytes of one that is not sent as JSON.
        path: Path of the route.
        content_type: Header of this name; None for none.
    """
    # A field of several types has errors for each of them.
    first = min(errors, key=_misfit)
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        message = f"The body is no JSON: {reason} at character {first['loc'][-1]}."
        return ApiError(400, message, code="invalid_json")
    place = _place(first, body)
    if not place:
        return _no_object(first, body, content_type)
    param = ".".join(str(part) for part in place)[:200]
    field = str(place[-1])
    if first["type"] == "extra_forbidden":
        if field in _UNSUPPORTED:
            message, code = f"{param} is not supported by this server.", "unsupported_parameter"
        else:
            message, code = _unknown(param, path), "unknown_parameter"
        return ApiError(400, message, param=param, code=code)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing.", param=param, code="missing_parameter")
    if any(part in _UNSUPPORTED for part in place):
        message, code = f"{param} with this value is not supported.", "unsupported_parameter"
        return ApiError(400, message, param=param, code=code)
    return ApiError(400, f"{param}: {first['msg']}.", param=param, code="invalid_value")


def unreadable_body(cause: BaseException | None) -> ApiError:
    """The answer to a body from which no JSON could be read. Local.

    Args:
        cause: Exception that the reading raised; None for one that is not known.
    """
    if isinstance(cause, RecursionError):
        reason = "arrays or objects are nested too deeply"
    elif isinstance(cause, UnicodeDecodeError):
        reason = f"byte {cause.start} is no {cause.encoding.upper()}"
    else:
        # The one other error of Python's reader: an integer with thousands of digits.
        reason = "a number in it is too long" if isinstance(cause, ValueError) else "unreadable"
    return ApiError(400, f"The body is no JSON: {reason}.", code="invalid_json")


def _no_object(error: Mapping[str, Any], body: Any, content_type: str | None) -> ApiError:
    """The answer to a body that has no fields, or a field whose name is no text."""
    if error["type"] == "string_unicode":
        name = ascii(error["input"])[:100]
        message = f"The name of the field {name} has half of a surrogate pair, which is no text."
    elif isinstance(body, bytes):
        sent = f"with Content-Type {content_type!r:.100}" if content_type else "without a type"
        message = f"The body is sent {sent}; send it with `Content-Type: application/json`."
    else:
        found = "empty" if error["type"] == "missing" else _KINDS.get(type(body), "a number")
        message = f"The body is {found}; send a JSON object."
    return ApiError(400, message, code="invalid_type")


def _misfit(error: Mapping[str, Any]) -> bool:
    """Whether the value is of another type, so that the error of a type that fits says more."""
    return str(error["type"]).endswith("_type")


def _place(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Where in the body an error is; pydantic adds names of the types that it has tried."""
    parts = [part for part in error["loc"] if part != "body"]
    found: list[str | int] = []
    value = body
    for place, part in enumerate(parts):
        is_missing = error["type"] == "missing" and place == len(parts) - 1
        if isinstance(value, dict):
            is_there = part in value
        else:
            is_there = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_there:
            value = value[part]
        elif not is_missing:
            continue
        found.append(part)
    return found


def _unknown(param: str, path: str) -> str:
    for other, request in _REQUESTS.items():
        if other != path and param in request.model_fields:
            return f"{param} is not a field of {path} but of {other}."
    known = _REQUESTS[path].model_fields if path in _REQUESTS and "." not in param else ()
    # A part of a field has no list of names here.
    return f"{param} is not known. {near_misses(param[:50], known) if known else ''}".rstrip()
