"""Which rank and operation part from the others: by hand, and against a plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.trace.divergence import Divergence, first_divergence


def test_by_hand() -> None:
    assert first_divergence({}) is None
    assert first_divergence({0: ["a", "b"], 1: ["a"], 2: []}) is None
    assert first_divergence({0: ["a", "b"], 1: ["a", "c"]}) == Divergence(1, 1, "c", 0, "b")
    # The odd one out is blamed, also if it is the first.
    odd = {0: ["x", "b"], 1: ["a", "b"], 2: ["a", "b"]}
    assert first_divergence(odd) == Divergence(0, 0, "x", 1, "a")
    # With as many on either side it is the higher rank, however they are listed.
    assert first_divergence({1: ["b"], 0: ["a"]}) == Divergence(0, 1, "b", 0, "a")
    # Whoever has not come so far has no part in it.
    short = {0: ["a"], 1: ["a", "b"], 3: ["a", "c"]}
    assert first_divergence(short) == Divergence(1, 3, "c", 1, "b")


@given(st.dictionaries(st.integers(0, 5), st.lists(st.sampled_from("ab"), max_size=5)))
def test_nothing_before_it_differs_and_it_does(lines: dict[int, list[str]]) -> None:
    found = first_divergence(lines)
    different = [
        i for i in range(5) if len({mine[i] for mine in lines.values() if len(mine) > i}) > 1
    ]
    assert (found.index if found else None) == (different[0] if different else None)
    if found:
        assert lines[found.rank][found.index] == found.line != found.other_line
        assert lines[found.other_rank][found.index] == found.other_line
        votes = [mine[found.index] for mine in lines.values() if len(mine) > found.index]
        assert votes.count(found.other_line) >= votes.count(found.line)
