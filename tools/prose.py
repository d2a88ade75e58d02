"""Find argument descriptions that are fragments, and words for persons that stand for processes.

    python tools/prose.py           # print every place
    python tools/prose.py --save    # write their numbers to tools/prose.toml

An argument is described by a noun phrase: what it is, its shape, its unit. A description that
begins with one of `FRAGMENTS` continues a sentence that is not there ("Of each."). Processes,
ranks and callers are named as what they are, not by one of `PERSONS`.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from repository import PACKAGES, ROOT

FRAGMENTS = ["As", "For", "In", "Of", "See"]
FRAGMENTS += ["What", "When", "Where", "Whether", "Which", "Who", "Whose"]
PERSONS = ["anybody", "anyone", "everybody", "nobody", "somebody", "someone", "whoever"]

ALLOWED = ROOT / "tools" / "prose.toml"

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)*)", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}(\*{0,2}\w+): *(.*)", re.MULTILINE)
_FRAGMENT = re.compile(rf"(?:{'|'.join(FRAGMENTS)})\b")
_PERSON = re.compile(rf"\b(?:{'|'.join(PERSONS)})\b", re.IGNORECASE)


def fragments(source: str) -> Iterator[str]:
    """`LINE OF THE DOCSTRING'S OWNER argument: description` of each that is a fragment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for section in _SECTION.findall(f"{ast.get_docstring(node) or ''}\n"):
                for name, text in _ARGUMENT.findall(section):
                    if _FRAGMENT.match(text):
                        yield f"{node.lineno} {name}: {text}"


def persons(source: str) -> Iterator[str]:
    """`LINE text` of each line with a word for a person, in docstrings, comments and messages."""
    for number, line in enumerate(source.splitlines(), start=1):
        if _PERSON.search(line):
            yield f"{number} {line.strip()}"


CHECKS: dict[str, Callable[[str], Iterator[str]]] = {"fragments": fragments, "persons": persons}


def places(check: str, package: Path) -> list[str]:
    """`FILE:LINE text` of all that a check finds in the sources of a package."""
    return [
        f"{path.relative_to(ROOT)}:{found}"
        for path in sorted((package / "src").rglob("*.py"))
        for found in CHECKS[check](path.read_text())
    ]


def allowed(check: str, package: Path) -> int:
    """The recorded number of places of a package, 0 where none is recorded."""
    return int(tomllib.loads(ALLOWED.read_text())[check].get(package.name, 0))


def record() -> str:
    """The text of tools/prose.toml for the sources as they are."""
    lines = [
        "# The number of places that `tools/prose.py` finds in each package. It may only shrink;",
        "# a package without a number has none. `python tools/prose.py --save` writes them.",
    ]
    for check in CHECKS:
        lines += ["", f"[{check}]"]
        counted = {package.name: len(places(check, package)) for package in PACKAGES}
        lines += [f"{name} = {number}" for name, number in counted.items() if number]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--save" in sys.argv[1:]:
        ALLOWED.write_text(record())
    for one in CHECKS:
        print(*(place for package in PACKAGES for place in places(one, package)), sep="\n")
