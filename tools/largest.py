"""Print the largest source files and functions, where a split may be due.

python tools/largest.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT, sources

FILE_LIMIT = 600
FILE_AIM = 300
SHOWN = 10


def num_lines(path: Path) -> int:
    """The lines of a file, blank ones and comments included."""
    return len(path.read_text().splitlines())


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """The length in lines and the place of every function of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield length, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def report() -> str:
    """The largest files and functions, longest first."""
    files = [(num_lines(path), str(path.relative_to(ROOT))) for path in sources()]
    every_function = [found for path in sources() for found in functions(path)]
    lines = [f"Lines of the largest files (aim {FILE_AIM}, limit {FILE_LIMIT}):"]
    lines += [f"{length:6}  {place}" for length, place in sorted(files, reverse=True)[:SHOWN]]
    lines += ["", "Lines of the largest functions:"]
    lines += [f"{length:6}  {at}" for length, at in sorted(every_function, reverse=True)[:SHOWN]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
