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
def test_the_message_is_the_four_parts_in_order(kind: type[PcommError]) -> None:
    assert str(made(kind)) == "asked: the value 3\nIt is odd.\nUse 4."


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling_with_its_parts(kind: type[PcommError]) -> None:
    error = pickle.loads(pickle.dumps(made(kind)))
    assert type(error) is kind
    assert (error.asked, error.found) == ("asked", "the value 3")
    assert (error.why, error.fix) == ("It is odd.", "Use 4.")
    assert str(error) == str(made(kind))


def test_every_kind_is_exported_and_a_pcomm_error() -> None:
    assert {kind.__name__ for kind in KINDS} | {"near_misses"} == set(errors.__all__)
    assert all(issubclass(kind, PcommError) for kind in KINDS)


def test_all_four_parts_are_required() -> None:
    with pytest.raises(TypeError, match="fix"):
        ConfigError("asked", found="x", why="y")  # type: ignore[call-arg]


def test_callers_can_catch_the_usual_python_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(errors.TopologyError, ValueError)
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.PeerTimeoutError, TimeoutError)


def test_near_misses_names_the_closest_first_or_else_all() -> None:
    assert near_misses("tpp", ["edp", "tp", "cp"]) == "Did you mean 'tp'?"
    assert near_misses("dp_cq", ["dp", "dp_cp"]) == "Did you mean 'dp_cp' or 'dp'?"
    assert near_misses("xyz", ["tp", "dp"]) == "Known here: 'dp', 'tp'."
    assert near_misses("xyz", []) == "Known here: nothing."
