"""How the next token of a request is chosen, and when the request ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pcomm.inference.engine.sampling.sampling_checks import check_params

__all__ = ["SamplingParams"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    r"""Settings of one request; checked when it is made.

    A list is accepted for a tuple. Token ids are checked by `Engine.add`, which knows the
    vocabulary.

    Attributes:
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to draw from; 0 for all.
        top_p: Smallest probability that the likeliest tokens to draw from have together, above 0
            and up to 1.
        min_p: Least probability of a token to draw, as a factor of the largest one.
        repetition_penalty: Divisor of positive logits (factor of negative ones) of tokens that the
            prompt or the text has, from 1e-6 to 1e6; 1 for none.
        presence_penalty: Number taken from the logits of tokens that the text has, from
            -1e6 to 1e6.
        frequency_penalty: Number taken from the logit of a token each time the text has it,
            from -1e6 to 1e6.
        logit_bias: Number added to the logit of a token id, from -1e6 to 1e6.
        seed: Seed of the draws; two requests with the same one, settings and prompt get the same
            tokens, whatever else is in the batch.
        max_tokens: Most tokens to write.
        min_tokens: Fewest tokens before a stop token or stop string ends the text.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Token ids that end the text, in addition to those of the model.
        ignore_eos: True to go on after the model's own stop tokens.
        logprobs: Number of likeliest tokens whose log-probabilities are returned with each token;
            0 gives only that of the token, None none.
        prompt_logprobs: The same for the tokens of the prompt.
        json_schema: JSON schema that the text satisfies, as a JSON string; None for any text.
        regex: Regular expression that the whole text matches, in the syntax of Rust's crate `regex`
            with Unicode: `\d` and `\w` stand for digits and letters of all scripts, and `[0-9]`
            for ten. None for any text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        check_params(self)
        # What a caller changes later does not change a request that was checked.
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
