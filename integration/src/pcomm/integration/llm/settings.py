"""Settings of several texts, and those that a conversation adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pcomm.core.errors import ConfigError
from pcomm.inference import SamplingParams

__all__ = ["checked", "settings_of", "with_stop"]


def settings_of(
    params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> list[SamplingParams]:
    """Settings for each of `number` prompts. Local.

    Args:
        params: Settings for all, one for each, or None for the defaults.
        number: Number of prompts.

    Raises:
        ConfigError: There are settings for another number of prompts, or they are something else.
    """
    if not isinstance(params, list | tuple):
        return [checked(params)] * number
    if len(params) != number:
        raise ConfigError(
            "LLM.generate: params",
            found=f"{len(params)} settings for {number} prompts",
            why="Each prompt is continued with one of them.",
            fix="Give one SamplingParams for all prompts, or one for each.",
        )
    return [checked(one) for one in params]


def checked(params: object) -> SamplingParams:
    """`params`, or the defaults for None. Local.

    Raises:
        ConfigError: It is something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return params or SamplingParams()
    raise ConfigError(
        "LLM: params",
        found=f"{params!r:.100}, a {type(params).__name__}",
        why="Settings are checked together, when a SamplingParams is made of them.",
        fix="Give for example `SamplingParams(max_tokens=3)` of pcomm.inference.",
    )


def with_stop(params: SamplingParams, stop: tuple[str, ...]) -> SamplingParams:
    """`params` with more strings that end the text. Local."""
    more = tuple(text for text in stop if text not in params.stop)
    return replace(params, stop=params.stop + more) if more else params
