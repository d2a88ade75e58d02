"""The held-out split: by name or content, stable, and never empty on one side."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.integration.data.building import cut_text, held_out_mask

NAMES = st.lists(st.text(), min_size=2, max_size=60, unique=True)


def test_the_split_is_the_same_everywhere():
    names = [f"{i}.txt" for i in range(20)]
    held_out = [i for i, held in enumerate(held_out_mask(names, 0.5)) if held]
    # Written down once: another hash would give every run another split.
    assert held_out == [1, 2, 3, 5, 7, 9, 10, 13, 14, 18]


def test_the_share_is_about_what_was_asked_for():
    mask = held_out_mask([f"{i}.txt" for i in range(20_000)], 0.05)
    # Binomial with standard deviation 31: five of them.
    assert abs(mask.sum() - 1000) < 155


@settings(deadline=None)
@given(names=NAMES, share=st.floats(0.001, 0.999), data=st.data())
def test_a_document_stays_on_its_side_when_others_come_or_move(names, share, data):
    order = data.draw(st.permutations(names))
    sides = dict(zip(names, held_out_mask(names, share), strict=True))
    shuffled = dict(zip(order, held_out_mask(order, share), strict=True))
    assert sides == shuffled
    more = [f"{name} more" for name in names]
    grown = dict(zip([*more, *names], held_out_mask([*more, *names], share), strict=True))
    # Only a document that was put on an empty side may go back when that side fills.
    assert sum(sides[name] != grown[name] for name in names) <= 1


@settings(deadline=None)
@given(names=NAMES, share=st.floats(1e-9, 1 - 1e-9))
def test_neither_side_is_empty(names, share):
    mask = held_out_mask(names, share)
    assert 0 < mask.sum() < len(names)


def test_nothing_is_held_out_where_nothing_is_asked_for():
    assert not held_out_mask(["a.txt"], 0).any()
    assert not held_out_mask([f"{i}" for i in range(1000)], 0).any()


def test_equal_documents_are_on_one_side_unless_there_are_no_others():
    assert held_out_mask(["a", "b", "a", "b"], 1e-9).tolist() in (
        [True, False, True, False],
        [False, True, False, True],
    )
    assert held_out_mask(["a"] * 3, 0.1).tolist() == [True, False, False]
    assert held_out_mask(["a"] * 3, 0.99).sum() in (1, 2)


WORDS = st.text(st.sampled_from("ab \n\t\u2003"), min_size=2, max_size=200)


@settings(deadline=None)
@given(text=WORDS, share=st.floats(1e-9, 1 - 1e-9))
def test_both_parts_of_a_text_hold_something_and_are_the_text(text, share):
    parts = cut_text(text, share)
    if parts is None:
        assert len(text.strip()) < 2
        return
    assert "".join(parts) == text
    assert all(part.strip() for part in parts)


def test_a_text_is_cut_where_a_line_ends_or_a_word_or_anywhere():
    lines = "".join(f"{n:03} words of a line\n" for n in range(100))
    train, held_out = cut_text(lines, 0.1)
    assert train.endswith("\n")
    assert len(held_out) == len(lines) // 10
    # One line alone: at a word.
    train, held_out = cut_text("word " * 100, 0.1)
    assert (len(held_out), train[-5:]) == (50, "word ")
    # No word ends near enough.
    train, held_out = cut_text("a " + "x" * 998, 0.1)
    assert (len(train), len(held_out)) == (900, 100)
    # Megabytes.
    train, held_out = cut_text("x" * (4 << 20), 0.25)
    assert len(held_out) == 1 << 20
