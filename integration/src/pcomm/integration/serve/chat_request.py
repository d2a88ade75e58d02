"""Body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pcomm.integration.serve.request_fields import Fields, RequestFields, ResponseFormat

__all__ = ["ChatRequest"]

Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""A list of what is not supported: clients send an empty one for none."""


class TextPart(Fields):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """One message of a conversation; tools and pictures are not supported.

    An answer may be sent back as clients keep it, with null for what it has not.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: Nothing = None

    def plain(self) -> dict[str, object]:
        """The message as templates read it: with one text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        # `developer` is the newer name, which templates do not know.
        role = "system" if self.role == "developer" else self.role
        found: dict[str, object] = {"role": role, "content": text}
        return found | ({"name": self.name} if self.name is not None else {})


class ChatRequest(RequestFields):
    """Answer a conversation, `n` times.

    The fields from `store` on take the values that ask for nothing, as clients send them by
    default; `metadata` and `parallel_tool_calls` have no effect with any value.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    tools: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
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
