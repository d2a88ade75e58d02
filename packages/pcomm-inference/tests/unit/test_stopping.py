"""When a request ends, by its token ids."""

import pytest

from pcomm.inference.engine.sampling.sampling_params import SamplingParams
from pcomm.inference.engine.sampling.stopping import finish_reason, stop_ids


def test_the_models_own_end_tokens_can_be_ignored_and_those_asked_for_cannot() -> None:
    asked = (5, 3)
    assert stop_ids(SamplingParams(stop_token_ids=asked), [3, 2]) == (2, 3, 5)
    assert stop_ids(SamplingParams(stop_token_ids=asked, ignore_eos=True), [3, 2]) == (3, 5)
    assert stop_ids(SamplingParams(), ()) == ()


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
def test_the_reason(token_id, num_output, room, reason) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=2)
    found = finish_reason(params, (2,), token_id=token_id, num_output=num_output, room=room)
    assert found == reason


def test_a_complete_grammar_ends_the_text_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=5)
    found = finish_reason(params, (2,), token_id=7, num_output=1, room=9, is_complete=True)
    assert found == "stop"
