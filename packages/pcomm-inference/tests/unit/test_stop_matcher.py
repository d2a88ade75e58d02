"""Stop strings in a text that comes in parts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.inference.text import StopMatcher


def up_to_the_first(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first, the longest of several."""
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    return text[: min(ends)[1]] if ends else text


def held(text: str, stop: list[str]) -> str:
    """The longest end of a text that is the begin of a stop string."""
    begins = [one[:length] for one in stop for length in range(1, len(one))]
    return max((one for one in begins if text.endswith(one)), key=len, default="")


few_letters = st.text(alphabet="ab", max_size=14)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=5)


@settings(max_examples=150, deadline=None)
@given(text=few_letters, stop=stops, cuts=st.sets(st.integers(0, 14)))
def test_parts_give_the_text_before_the_first_one(text, stop, cuts) -> None:
    matcher, shown, begin = StopMatcher(stop), "", 0
    expected = up_to_the_first(text, stop)
    for end in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        shown += matcher.push(text[begin:end])
        begin = end
        seen = up_to_the_first(text[:end], stop)
        assert matcher.is_stopped == (seen != text[:end])
        # All that cannot become part of a stop string is shown, and nothing else is.
        assert shown == (seen if matcher.is_stopped else seen.removesuffix(held(seen, stop)))
    assert shown + matcher.flush() == expected
    assert matcher.push("more") == "" or not matcher.is_stopped


def test_a_thousand_stop_strings_are_looked_for_at_once() -> None:
    stop = [f"<{number}>" for number in range(1000)]
    matcher = StopMatcher(stop)
    assert matcher.push("a <1000> <99") == "a <1000> "
    assert matcher.push("9") == ""
    assert matcher.push("> b") == ""
    assert matcher.is_stopped


def test_text_that_may_not_stop_is_shown_even_where_it_holds_a_stop_string() -> None:
    matcher = StopMatcher(["end", "dx"])
    assert matcher.push("an end", may_stop=False) == "an en"
    # A stop string that begins in it and is complete behind it counts.
    assert matcher.push("x y") == ""
    assert matcher.is_stopped
    assert matcher.flush() == ""
