"""What a package shows: names that are loaded when they are used first (PEP 562); its version."""

from __future__ import annotations

import sys

# And not `ast`, which takes a millisecond to load.
from _ast import ImportFrom, Module, PyCF_ONLY_AST
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["face", "version_of"]


def face(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the `__init__.py` of a package.

    The names stand once, as imports in the stub `__init__.pyi` beside it, which type checkers and
    editors read by themselves. Importing the package loads none of the modules that they come
    from, and using a name loads no more than its module.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package.

    Raises:
        AttributeError: By the returned `__getattr__`, for a name that the stub does not import.
    """
    stub = Path(file).with_suffix(".pyi")
    tree = compile(stub.read_bytes(), stub, "exec", PyCF_ONLY_AST)
    assert isinstance(tree, Module)
    imports = [node for node in tree.body if isinstance(node, ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(homes[name]), name)
        # The next use finds it without this function.
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names, sorted(homes)


def version_of(distribution: str) -> str:
    """Version of an installed distribution; `"0+source"` where only its sources are on the path."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "0+source"
