"""Modules of the package import each other in one direction, for types as well."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from pcomm.gdn_cp import plan

ROOT = Path(plan.__file__).parent
PACKAGE = "pcomm.gdn_cp"
# A room imports from itself and from the rooms before it.
ROOMS = [
    "triton_packing",
    "pack_offsets",
    "ops",
    "token_layout",
    "sequence_segments",
    "specs",
    "strategies",
]


def imports(path: Path) -> set[str]:
    """The modules of the package that a file names in any import: lazy ones and types included."""
    named = {
        str(node.module)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{PACKAGE}.")
    }
    return {name.removeprefix(f"{PACKAGE}.") for name in named}


def tree() -> dict[str, set[str]]:
    """Imports of every module but the faces, which name what lies below them."""
    paths = [path for path in ROOT.rglob("*.py") if path.name != "__init__.py"]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): imports(p) for p in paths}


def test_no_module_imports_one_that_imports_it() -> None:
    assert "arguments" in tree()["plan"]
    TopologicalSorter(tree()).prepare()


def test_a_cycle_for_types_alone_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "arguments.py"
    path.write_text(f"if TYPE_CHECKING:\n    from {PACKAGE}.plan import make_plan\n")
    with pytest.raises(CycleError):
        TopologicalSorter({**tree(), "arguments": imports(path)}).prepare()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_the_rooms_below_it(room: str) -> None:
    below = {*ROOMS[: ROOMS.index(room) + 1]}
    found = {
        name.split(".")[0]
        for module, named in tree().items()
        if module.split(".")[0] == room
        for name in named
    }
    assert found <= below
