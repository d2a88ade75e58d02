"""When a request ends, by its token ids."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from pcomm.inference.engine.request import Request, RequestState
from pcomm.inference.sampling.params import SamplingParams


def state(params: SamplingParams, eos_ids: Sequence[int] = (2,), most: int = 99) -> RequestState:
    request = Request("a", (1, 1, 1), params)
    return RequestState(request=request, max_model_len=most, eos_ids=eos_ids)


def test_the_models_own_end_tokens_can_be_ignored_and_those_asked_for_cannot() -> None:
    asked = (5, 3)
    assert state(SamplingParams(stop_token_ids=asked), [3, 2]).stop_ids == (2, 3, 5)
    params = SamplingParams(stop_token_ids=asked, ignore_eos=True)
    assert state(params, [3, 2]).stop_ids == (3, 5)
    assert state(SamplingParams(), ()).stop_ids == ()


@pytest.mark.parametrize(
    ("token_id", "num_output", "room", "reason"),
    [
        (7, 3, 9, None),
        (2, 3, 9, "stop"),
        (2, 2, 9, None),
        (7, 8, 9, "length"),
        (2, 8, 0, "stop"),
        (7, 3, 0, "length"),
        (7, 3, 1, None),
    ],
)
def test_the_reason(token_id: int, num_output: int, room: int, reason: str | None) -> None:
    live = state(SamplingParams(max_tokens=8, min_tokens=2), most=3 + num_output + room)
    live.tokens.extend([7] * (num_output - 1))
    live.output.extend([7] * (num_output - 1))
    assert live.accept([token_id], [None]).finish_reason == reason


def test_a_complete_grammar_ends_the_text_before_min_tokens() -> None:
    live = state(SamplingParams(min_tokens=5))
    live.grammar = SimpleNamespace(accept=lambda token_id: None, is_finished=True)
    assert live.accept([7], [None]).finish_reason == "stop"
