"""What a user asks of the engine, and what the engine says of it after each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pcomm.inference.engine.sampling.sampling_params import SamplingParams
from pcomm.inference.engine.sampling.structured.compiled_grammar import CompiledGrammar

__all__ = ["FinishReason", "Request", "RequestOutput", "TokenLogprobs"]

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: a stop token or stop string; `length`: `max_tokens` or the longest context; `error`: an
exception in the model or the grammar, or logits that are not numbers. `abort` is for those who end
a request by `Engine.abort`: the engine says nothing of it after that."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue once; `n` continuations are n requests that share a prefix.

    Attributes:
        request_id: Name that is unique among the requests under way.
        prompt: Token ids of the prompt, at least one.
        params: Sampling settings and limits.
        priority: Requests with a smaller number are scheduled first; equal ones in the order in
            which they came.
        grammar: Grammar of `params`, from `GrammarCompiler.compile`; None for `Engine.add` to
            compile it. It is no part of the request for another process, which compiles it itself.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    grammar: CompiledGrammar | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "grammar": None}


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of one token, before temperature and other settings act.

    Attributes:
        token_id: The token that was written, or that the prompt has.
        logprob: Its log-probability.
        top: Log-probabilities of the likeliest tokens by id, the likeliest first.
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


# Not frozen: that makes it five times as slow to make, and a step makes one for each request.
@dataclass(slots=True)
class RequestOutput:
    """What one step did for one request; the engine keeps no reference to it.

    Attributes:
        request_id: The name of the request.
        token_ids: Tokens written in this step; the stop token, if one ended the text, is the last.
        text: Text that became certain in this step: no part of it can still be cut off by a stop
            string, and it ends in a whole character. Empty where the engine has no tokenizer.
        finish_reason: None while the request goes on.
        logprobs: One entry for each of `token_ids`, where the request asked for them.
        prompt_logprobs: One entry for each token of the prompt but the first, in the step that ends
            the prompt, where the request asked for them; otherwise empty.
        cached_tokens: Number of tokens of the prompt whose computation the prefix cache saved.
        error: The exception that ended the request, with `finish_reason` "error".
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    error: Exception | None = None
