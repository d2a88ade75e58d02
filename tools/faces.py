"""The faces of the packages, read from the sources: which names users import, and their homes.

A package or a room of a package shows the names that the stub `__init__.pyi` beside its
`__init__.py` imports. Type checkers read the stub; programs load a name by `face(...)` when they
use it. Nothing is imported here.
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
    """Stubs of the packages, and of rooms of packages, that show names."""
    stubs = {path.with_suffix(".pyi") for path in sources() if path.name == "__init__.py"}
    return {module_of(path): path for path in sorted(stubs) if path.exists()}


def homes(stub: Path) -> dict[str, str]:
    """Names that a face shows, each with the module that defines it."""
    imports = [
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def summary(stub: Path) -> str:
    """The docstring of the package that a stub belongs to."""
    return ast.get_docstring(ast.parse(stub.with_suffix(".py").read_text())) or ""
