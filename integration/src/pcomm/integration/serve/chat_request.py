"""Body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pcomm.integration.serve.request_fields import Fields, RequestFields, ResponseFormat

__all__ = ["ChatRequest"]


class TextPart(Fields):
    """A part of a message; only text is read."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """One message of a conversation; tools and pictures are not supported."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    def plain(self) -> dict[str, object]:
        """The message as templates read it: with one text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        # `developer` is the newer name, which templates do not know.
        role = "system" if self.role == "developer" else self.role
        found: dict[str, object] = {"role": role, "content": text}
        return found | ({"name": self.name} if self.name is not None else {})


class ChatRequest(RequestFields):
    """Answer a conversation, `n` times."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
