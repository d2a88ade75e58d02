"""The held-out split: by name, stable, and never empty on one side."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
from pcomm.integration.data.split import held_out_mask

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


def test_one_document_cannot_be_on_both_sides():
    with pytest.raises(ConfigError, match=r"one document, 'a\.txt'") as raised:
        held_out_mask(["a.txt"], 0.05)
    assert "data.held_out = 0" in raised.value.fix
