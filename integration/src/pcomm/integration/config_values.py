"""The types of configuration values: what fits a key, how a type is called, how TOML writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Literal, get_args, get_origin

__all__ = ["convert", "expected_type", "name_of_type", "toml_value"]


def convert(value: object, annotation: object) -> object | None:
    """`value` as the type of a key, or None where it is of another type."""
    if get_origin(annotation) is Literal:
        return value if isinstance(value, str) and value in get_args(annotation) else None
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if not isinstance(value, list | tuple):
            return None
        kinds = [items[0]] * len(value) if items[-1] is Ellipsis else list(items)
        if len(kinds) != len(value):
            return None
        converted = [convert(item, kind) for item, kind in zip(value, kinds, strict=True)]
        return None if None in converted else tuple(converted)
    # A bool is an int to Python, but not to a reader of `layers = true`.
    if isinstance(value, bool) or annotation is bool:
        return value if isinstance(value, bool) and annotation is bool else None
    if annotation is float and isinstance(value, int | float):
        # Also false for NaN, for the infinities and for an int that no float can hold.
        return float(value) if abs(value) <= sys.float_info.max else None
    if annotation is str and isinstance(value, str):
        # A lone surrogate (bytes of the command line that are no UTF-8) could not be written back.
        return None if any("\ud800" <= char <= "\udfff" for char in value) else value
    return value if annotation is int and isinstance(value, int) else None


def expected_type(annotation: object) -> str:
    """The type of a key in words, for an error."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if items[-1] is Ellipsis:
            return f"a list of which each item is {expected_type(items[0])}"
        return f"a list of {len(items)} items, of which each is {expected_type(items[0])}"
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
    return names[annotation]  # type: ignore[index]


def name_of_type(value: object) -> str:
    """The type of a value in TOML's words, for an error."""
    # A bool is an int as well, so the order counts.
    names: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (list, "a list"),
        (Mapping, "a table"),
    )
    for kind, name in names:
        if isinstance(value, kind):
            return name
    return f"a {type(value).__name__}"


def toml_value(value: object) -> str:
    """A scalar, or a tuple of scalars, as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
