"""The names that a package shows, each loaded when it is used first (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["face"]


def face(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the `__init__.py` of a package.

    Importing the package then costs nothing, and a name loads no more than the module that it is
    defined in. Type checkers read the same names from imports below `if TYPE_CHECKING`.

    Args:
        package: `__name__` of the package.
        homes: Module that defines each shown name, relative to `package`, by name.

    Raises:
        AttributeError: By the returned `__getattr__`, for a name that is not in `homes`.
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(f"{package}.{homes[name]}"), name)
        # The next use finds it without this function.
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
