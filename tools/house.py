"""Check what CONTRIBUTING says of modules, rooms, names and cycles, by reading the sources.

python tools/house.py

Lines are raw ones, blank lines and comments included. A room is a folder with its files. Imports
count wherever they stand, in functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path

from faces import module_of
from repository import ROOT, sources

MOST_LINES = 600
MOST_FILES = 12

Graph = Mapping[str, set[str]]
"""What each module, or room, imports of its own package."""


def long_files() -> dict[str, int]:
    """Lines of each source file that is over the limit."""
    lines = {_place(path): len(path.read_text().splitlines()) for path in sources()}
    return {place: number for place, number in lines.items() if number > MOST_LINES}


def wide_rooms() -> dict[str, int]:
    """Numbers of files of each folder of sources that is over the limit, `__init__.py` included."""
    files = Counter(_place(path.parent) for path in sources())
    return {room: number for room, number in files.items() if number > MOST_FILES}


def shared_class_names() -> dict[str, list[str]]:
    """Modules of each public class name that several modules define."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module_of(path))
    return {name: modules for name, modules in found.items() if len(modules) > 1}


@cache
def imports() -> dict[str, set[str]]:
    """The imports between the modules of a package. A face counts as a module of its own."""
    paths = {module_of(path): path for path in sources()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        package = module.split(".")[:2]
        named = set(imported(path.read_text(), paths))
        graph[module] = {one for one in named if one.split(".")[:2] == package} - {module}
    return graph


def imported(source: str, known: Container[str]) -> Iterator[str]:
    """Known modules that a source imports; of `from a import b`, `a.b` where that is one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                module = inner if inner in known else node.module
                if module in known:
                    yield module


def rooms(graph: Graph) -> dict[str, set[str]]:
    """The same between rooms and the files beside them: `pcomm.core.trace`, `pcomm.core.layout`."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        found[_room(module)] |= {_room(target) for target in targets} - {_room(module)}
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Sets of modules each of which reaches all the others, in sorted order."""
    reach = {module: _reachable(graph, module) for module in graph}
    found = {
        tuple(sorted({module} | {other for other in reach[module] if module in reach[other]}))
        for module in graph
    }
    return [list(cycle) for cycle in sorted(found) if len(cycle) > 1]


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        for target in graph.get(pending.pop(), set()) - seen:
            seen.add(target)
            pending.append(target)
    return seen


def _room(module: str) -> str:
    return ".".join(module.split(".")[:3])


def _place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def report() -> str:
    """All that is over a limit, one item a line."""
    graph = imports()
    lines = [f"{number} lines: {place}" for place, number in long_files().items()]
    lines += [f"{number} files: {room}" for room, number in wide_rooms().items()]
    lines += [f"class {name}: {', '.join(at)}" for name, at in shared_class_names().items()]
    lines += [f"cycle of files: {', '.join(cycle)}" for cycle in cycles(graph)]
    lines += [f"cycle of rooms: {', '.join(cycle)}" for cycle in cycles(rooms(graph))]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
