"""When a request ends, decided from its token ids; stop strings are `TextStream`'s."""

from __future__ import annotations

from collections.abc import Sequence

from pcomm.inference.engine.request import FinishReason
from pcomm.inference.engine.sampling.sampling_params import SamplingParams

__all__ = ["finish_reason", "stop_ids"]


def stop_ids(params: SamplingParams, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids that end a request: the model's own, unless ignored, and those asked for.

    Args:
        params: Settings of the request.
        eos_ids: Token ids by which the model ends a text.

    Returns:
        The ids in ascending order, each once; computed once when a request is added.
    """
    own = () if params.ignore_eos else eos_ids
    return tuple(sorted({*own, *params.stop_token_ids}))


def finish_reason(
    params: SamplingParams,
    stop_ids: Sequence[int],
    *,
    token_id: int,
    num_output: int,
    room: int,
    is_complete: bool = False,
) -> FinishReason | None:
    """The reason for which a request ends with its newest token, None while it goes on. Local.

    A stop token within `min_tokens`, which only a grammar can bring, does not end it.

    Args:
        params: Settings of the request.
        stop_ids: Token ids that end it, from `stop_ids`.
        token_id: The newest token.
        num_output: Number of tokens written so far, the newest included.
        room: Number of tokens that still fit in the longest context of the model.
        is_complete: `GrammarState.is_finished` behind the newest token: nothing can follow.
    """
    if is_complete or (token_id in stop_ids and num_output > params.min_tokens):
        return "stop"
    return "length" if num_output >= params.max_tokens or room <= 0 else None
