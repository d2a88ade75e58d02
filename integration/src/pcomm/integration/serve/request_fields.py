"""Fields that completions and chat completions share; a field that is not here is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["MOST_CHOICES", "JsonSchemaFormat", "RequestFields", "ResponseFormat", "StreamOptions"]

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


class RequestFields(Fields):
    """How tokens are drawn and when a text ends; null is the same as a field that is absent.

    `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids` and `ignore_eos` are not
    OpenAI's; they are those of `SamplingParams`, and the names that other servers use. `user`,
    `safety_identifier` and `prompt_cache_key` have no effect.
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
