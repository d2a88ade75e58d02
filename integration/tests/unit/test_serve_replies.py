"""Logprobs on their way to a client: where their tokens stand, and numbers that JSON lacks."""

from __future__ import annotations

import json
import math

import pytest

from pcomm.inference import RequestOutput
from pcomm.inference.sampling import TokenLogprobs

pytest.importorskip("fastapi")

from pcomm.integration.serve.response_bodies import ChatReply, CompletionReply


class Texts:
    """Every token is an x."""

    def bytes_of(self, token_id: int) -> bytes:
        return b"x"

    def text_of(self, token_id: int) -> str:
        return "x"

    def is_special(self, token_id: int) -> bool:
        return token_id == 0


def test_offsets_of_tokens_go_on_over_chunks_of_each_text():
    made = CompletionReply("x", "m", Texts(), num_texts=2, has_usage=False, has_logprobs=True)
    entries = tuple(TokenLogprobs(1, -0.5, {}) for _ in range(3))
    offsets = []
    for place, count in ((0, 2), (1, 1), (0, 3), (1, 2)):
        output = RequestOutput("x-0", (1,) * count, text="x" * count, logprobs=entries[:count])
        ((choice,),) = (part["choices"] for part in made.chunks(place, output))
        offsets.append(choice["logprobs"]["text_offset"])
    assert offsets == [[0, 1], [0], [2, 3, 4], [1, 2]]


@pytest.mark.parametrize("reply", [CompletionReply, ChatReply])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -1e30])
def test_logprobs_are_numbers_of_json(reply, value):
    made = reply("x", "m", Texts(), num_texts=1, has_usage=False, has_logprobs=True)
    entry = TokenLogprobs(1, value, {2: value})
    (*_, part) = made.chunks(0, RequestOutput("x-0", (1,), text="x", logprobs=(entry,)))
    assert json.dumps(part, allow_nan=False).count("-9999.0") == 2
