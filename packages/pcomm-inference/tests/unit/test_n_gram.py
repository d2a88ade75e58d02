"""Drafts are what followed the last tokens before."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.inference.engine.engine import count_accepted
from pcomm.inference.engine.scheduler import draft_tokens


def by_comparing(tokens, most):
    if most < 1:
        return ()
    for length in (4, 3, 2):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                return tuple(tokens[begin + length : begin + length + most])
    return ()


@given(
    # Some ids have zero bytes in common, at places that are not those of tokens.
    tokens=st.lists(st.sampled_from([0, 1, 2, 256, 65536, 2**40]), max_size=30),
    most=st.integers(-1, 5),
)
def test_it_is_the_latest_longest_match(tokens, most):
    assert draft_tokens(array("q", tokens), most) == by_comparing(tokens, most)


@pytest.mark.parametrize(
    ("drafts", "sampled", "right"),
    [((), [5], 0), ((1, 2), [1, 2, 3], 2), ((1, 2), [1, 5, 2], 1), ((1, 2), [2, 2, 3], 0)],
)
def test_drafts_are_right_up_to_the_first_other_token(drafts, sampled, right):
    assert count_accepted(drafts, sampled) == right
