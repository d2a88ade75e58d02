"""Numbers that JSON does not have, on their way to a client."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pcomm.inference import RequestOutput
from pcomm.inference.engine import TokenLogprobs

pytest.importorskip("fastapi")

from pcomm.integration.serve.replies import ChatReply, CompletionReply


class Texts:
    """Every token is an x."""

    def bytes_of(self, token_id: int) -> bytes:
        return b"x"

    def text_of(self, token_id: int) -> str:
        return "x"


@pytest.mark.parametrize("reply", [CompletionReply, ChatReply])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -1e30])
def test_logprobs_are_numbers_of_json(reply: Any, value: float) -> None:
    made = reply("x", "m", Texts(), num_texts=1, has_usage=False, has_logprobs=True)
    entry = TokenLogprobs(1, value, {2: value})
    (*_, part) = made.chunks(0, RequestOutput("x-0", (1,), text="x", logprobs=(entry,)))
    assert json.dumps(part, allow_nan=False).count("-9999.0") == 2
