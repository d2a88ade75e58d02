"""The rules of CONTRIBUTING on modules, rooms, names and cycles hold for the sources."""

import pytest

import house
from repository import ROOT


def test_a_module_is_read_in_one_sitting():
    assert house.long_files() == {}


def test_a_room_has_few_files():
    assert house.wide_rooms() == {}


def test_a_class_name_has_one_meaning_in_all_packages():
    assert house.shared_class_names() == {}


@pytest.mark.parametrize("of", ["files", "rooms"])
def test_nothing_imports_in_a_circle(of):
    graph = house.imports()
    assert house.cycles(graph if of == "files" else house.rooms(graph)) == []


def test_imports_are_found_in_functions_and_for_types():
    """As in core's command, whose parts are imported when a subcommand is called."""
    graph = house.imports()
    assert len(graph) > 100
    assert graph["pcomm.core.layout"] <= set(graph)
    source = "def f():\n    from a.b import c, d\nif TYPE_CHECKING:\n    import a.e\n"
    named = house.imported(source, {"a.b", "a.b.c", "a.e"})
    assert sorted(named) == ["a.b", "a.b.c", "a.e"]


def test_a_cycle_is_all_that_reaches_itself():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}}
    assert house.cycles(graph) == [["a", "b", "c"]]
    modules = {"p.q.room.a": {"p.q.b"}, "p.q.b": {"p.q.room.c"}, "p.q.room.c": {"p.q.room.a"}}
    assert house.cycles(house.rooms(modules)) == [["p.q.b", "p.q.room"]]


def test_the_report_names_what_is_over_a_limit(monkeypatch):
    monkeypatch.setattr(house, "MOST_LINES", 10)
    monkeypatch.setattr(
        house, "sources", lambda: [ROOT / "packages/pcomm-core/src/pcomm/core/layout.py"]
    )
    assert "lines: packages/pcomm-core/src/pcomm/core/layout.py" in house.report()
