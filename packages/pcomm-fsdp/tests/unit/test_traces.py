"""How many ways to go through a model are remembered."""

from __future__ import annotations

import pytest

from pcomm.fsdp.schedule import Mark
from pcomm.fsdp.traces import MOST_TRACES, Traces


@pytest.mark.parametrize("count", [MOST_TRACES - 1, MOST_TRACES, MOST_TRACES + 1], ids=str)
def test_of_too_many_the_one_that_was_not_used_for_longest_is_forgotten(count: int) -> None:
    traces = Traces()
    marks = [Mark("use", f"unit {number}", "forward") for number in range(count)]
    for mark in marks:
        traces.learn("training", [mark])
    # The first one is used once more, so the second one goes if one has to.
    if count <= MOST_TRACES:
        traces.learn("training", marks[:1])
        traces.learn("training", [Mark("use", "another unit", "forward")])
    known = [traces.resume("training", [], mark) is not None for mark in marks]
    if count < MOST_TRACES:
        assert all(known)
    elif count == MOST_TRACES:
        assert known == [True, False, *[True] * (count - 2)]
    else:
        assert known == [False, *[True] * (count - 1)]
