"""The list of signatures has every name of a face, and a change is told by its name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

from faces import faces, homes
from repository import ROOT


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool without griffe, which only its own nox session installs."""
    if importlib.util.find_spec("griffe") is None:
        monkeypatch.setitem(sys.modules, "griffe", ModuleType("griffe"))
    return importlib.import_module("api")


def test_a_change_is_told_by_its_name(api):
    before = ["a.run(x: int) -> int", "a.Box(size: int)", "a.Box.size: int", "a.LIMIT: int"]
    now = ["a.run(x: float) -> int", "a.Box(size: int)", "a.Box.size: int", "a.Box.close() -> None"]
    assert api.changes(before, before) == []
    assert api.changes(before, now) == [
        "a.Box.close is new",
        "a.LIMIT is gone",
        "a.run changed\n    from a.run(x: int) -> int\n    to   a.run(x: float) -> int",
    ]


def test_the_list_has_every_name_of_a_face():
    listed = {
        line.partition("(")[0].partition(":")[0]
        for line in (ROOT / "tools" / "api.txt").read_text().splitlines()
    }
    shown = {f"{face}.{name}" for face, stub in faces().items() for name in homes(stub)}
    assert shown <= listed
    # What else is listed are members of classes that are shown.
    assert all(name.rpartition(".")[0] in shown for name in listed - shown)
