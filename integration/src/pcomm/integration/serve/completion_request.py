"""Body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pcomm.integration.serve.request_fields import MOST_CHOICES, RequestFields

__all__ = ["CompletionRequest"]

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(RequestFields):
    """Continue one prompt or several, each `n` times.

    `echo`, `best_of` and `suffix` take the values that ask for nothing.
    """

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
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
