"""The faces of the packages, read from the sources: which names users import, and their homes.

A package or a room of a package shows names in its `__init__.py`: under `if TYPE_CHECKING` for type
checkers, and in `face(...)` for programs, which load a name when they use it. Nothing is imported
here.
"""

from __future__ import annotations

import ast
from pathlib import Path

from repository import sources

# A module whose public names are all meant for users.
ERRORS = "pcomm.core.errors"


def module_of(path: Path) -> str:
    """The module of a source file: `pcomm.core.layout`."""
    parts = path.with_suffix("").parts
    module = ".".join(parts[len(parts) - parts[::-1].index("src") :])
    return module.removesuffix(".__init__")


def faces() -> dict[str, Path]:
    """Packages, and rooms of packages, whose `__init__.py` shows names."""
    found = {module_of(path): path for path in sources() if path.name == "__init__.py"}
    return {module: path for module, path in found.items() if "__getattr__" in path.read_text()}


def homes(source: str) -> dict[str, str]:
    """Names that the source of a face shows, each with the module that defines it."""
    (block,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def summary(source: str) -> str:
    """The docstring of a module."""
    return ast.get_docstring(ast.parse(source)) or ""
