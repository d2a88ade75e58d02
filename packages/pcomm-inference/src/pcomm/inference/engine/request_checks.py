"""Which requests the engine refuses, and why."""

from __future__ import annotations

from collections.abc import Container

from pcomm.core.errors import ConfigError
from pcomm.inference.engine.request import Request
from pcomm.inference.engine.sampling.sampling_checks import check_token_ids

__all__ = ["check_request"]


def check_request(
    request: Request,
    *,
    known: Container[str],
    vocabulary: int,
    max_model_len: int,
    has_tokenizer: bool,
) -> None:
    """Refuse a request that this engine can never serve.

    Args:
        request: New request.
        known: Names of the requests under way.
        vocabulary: Number of token ids.
        max_model_len: Most tokens of prompt and text together.
        has_tokenizer: True if the engine turns tokens into text.

    Raises:
        ConfigError: A field has another type, the name is in use, the prompt is empty, has other
            token ids or leaves no room for a token, or text is needed without a tokenizer.
    """
    asked, prompt, params = (
        f"Engine.add: request {request.request_id!r}",
        request.prompt,
        request.params,
    )
    _check_types(request, asked)
    if request.request_id in known:
        raise ConfigError(
            asked,
            found="a request of this name that is under way",
            why="Outputs and abort() find a request by its name.",
            fix="Give each request another request_id until the first has finished.",
        )
    if not prompt:
        raise ConfigError(
            asked,
            found="an empty prompt",
            why="The first token to write needs the logits of a token before it.",
            fix="Begin the prompt with the model's token for the begin of a text.",
        )
    wrong = [token for token in prompt if not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(
            asked,
            found=f"token ids {wrong[:5]} in the prompt and a vocabulary of {vocabulary}",
            why="A token id outside the vocabulary stands for no token of this model.",
            fix=f"Encode the prompt with the model's tokenizer: ids from 0 to {vocabulary - 1}.",
        )
    if len(prompt) >= max_model_len:
        raise ConfigError(
            asked,
            found=f"a prompt of {len(prompt)} tokens, and max_model_len is {max_model_len}",
            why="Prompt and text together have at most max_model_len tokens.",
            fix=f"Shorten the prompt to at most {max_model_len - 1} tokens, or raise the limit.",
        )
    needs_text = [n for n in ("stop", "json_schema", "regex") if getattr(params, n)]
    if needs_text and not has_tokenizer:
        raise ConfigError(
            asked,
            found=f"{needs_text[0]}, and an engine without a tokenizer",
            why="Stop strings and grammars are matched on text.",
            fix="Give Engine(tokenizer=...), or end the text by stop_token_ids.",
        )
    check_token_ids(params, vocabulary)


def _check_types(request: Request, asked: str) -> None:
    if not isinstance(request.request_id, str):
        raise ConfigError(
            asked,
            found=f"a request_id of type {type(request.request_id).__name__}",
            why="Outputs and abort() find a request by its name, which is a str.",
            fix="Give a str, for example str(number).",
        )
    if not _is_int(request.priority):
        raise ConfigError(
            asked,
            found=f"priority {request.priority!r}",
            why="Requests wait in the order of their priorities, which are ints.",
            fix="Give an int, smaller for what comes first; 0 is the default.",
        )
    wrong = [token for token in request.prompt if not _is_int(token)]
    if wrong:
        raise ConfigError(
            asked,
            found=f"{wrong[0]!r} of type {type(wrong[0]).__name__} in the prompt",
            why="A prompt is a sequence of token ids, which are ints.",
            fix="Encode a text with the model's tokenizer, and turn a tensor by its tolist().",
        )


def _is_int(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
