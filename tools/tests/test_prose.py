"""No argument description is a fragment, and no process is called a person."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from prose import CHECKS, allowed, fragments, persons, places
from repository import PACKAGES

CASES = list(product(CHECKS, PACKAGES))


@pytest.mark.parametrize(("check", "package"), CASES, ids=lambda one: getattr(one, "name", one))
def test_a_package_has_exactly_the_places_that_are_recorded(check: str, package: Path) -> None:
    found, known = places(check, package), allowed(check, package)
    listed = "\n".join(found)
    assert len(found) <= known, f"{check}: {known} are recorded; rewrite what is new of\n{listed}"
    assert len(found) == known, (
        f"{check}: {len(found)} are left and {known} recorded: run `python tools/prose.py --save`"
    )


SOURCE = '''
def move(size, *rest, kind, whole, **options):
    """Move it.

    Args:
        size: Of each.
        *rest: Weights, one for each rank.
        kind: What it is, which is described
            Where a line goes on.
        whole: Wherever this stands, it is no fragment.
        **options: As in `copy`.

    Returns:
        What was moved.
    """

class Box:
    """A box.

    Attributes:
        lid: Whether it is closed.
    """
'''


def test_fragments_are_found_by_the_first_word_of_a_description() -> None:
    assert list(fragments(SOURCE)) == [
        "2 size: Of each.",
        "2 kind: What it is, which is described",
        "2 **options: As in `copy`.",
        "17 lid: Whether it is closed.",
    ]


def test_persons_are_found_as_whole_words() -> None:
    source = '"""Nobody waits."""\nx = 1  # for whoever asks\nanybodys = everyones = 2\n'
    assert list(persons(source)) == ['1 """Nobody waits."""', "2 x = 1  # for whoever asks"]
