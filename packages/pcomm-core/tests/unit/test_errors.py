"""Errors: four parts, all in the message, and whole after a trip to another process."""

from __future__ import annotations

import pickle

import pytest

from pcomm.core import errors
from pcomm.core.errors import ConfigError, PcommError, near_misses

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and kind.__module__ == errors.__name__
]


def made(kind: type[PcommError]) -> PcommError:
    return kind("asked", found="the value 3", why="It is odd.", fix="Use 4.")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_has_four_parts_and_survives_pickling_with_them(kind: type[PcommError]) -> None:
    error = pickle.loads(pickle.dumps(made(kind)))
    assert type(error) is kind
    assert (error.asked, error.found) == ("asked", "the value 3")
    assert (error.why, error.fix) == ("It is odd.", "Use 4.")
    assert str(error) == str(made(kind)) == "asked: the value 3\nIt is odd.\nUse 4."


def test_callers_can_catch_the_usual_python_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(errors.TopologyError, ValueError)
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.PeerTimeoutError, TimeoutError)


def test_near_misses_names_the_closest_first_or_else_all() -> None:
    assert near_misses("tpp", ["edp", "tp", "cp"]) == "Did you mean 'tp'?"
    assert near_misses("dp_cq", ["dp", "dp_cp"]) == "Did you mean 'dp_cp' or 'dp'?"
    assert near_misses("lr", ["learning_rate", "layers"]) == "Did you mean 'learning_rate'?"
    # Two of four letters are shared, and it is another word.
    assert near_misses("list", ["plot", "chat"]) == "Known here: 'chat', 'plot'."
    assert near_misses("xyz", ["tp", "dp"]) == "Known here: 'dp', 'tp'."
    assert near_misses("xyz", []) == "Known here: nothing."
