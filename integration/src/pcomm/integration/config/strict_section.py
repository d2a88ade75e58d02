"""What makes a class a section of the configuration: strict types, and errors that explain keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from pcomm.core.errors import ConfigError, near_misses

__all__ = ["INT64", "UNICODE", "listed", "one_or_listed", "section", "shown", "toml_value"]

T = TypeVar("T")

_STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(name: str) -> Callable[[type[T]], type[T]]:
    """Make a class a section of the configuration: a frozen dataclass with keyword arguments.

    Types are strict, but for an int given for a float. What is no value of a key is a
    `ConfigError` that names every such key of the section, and explains it.

    Args:
        name: The section's name in TOML; empty for the whole configuration.
    """

    def make(cls: type[T]) -> type[T]:
        made: Any = dataclass(frozen=True, kw_only=True, config=_STRICT)(cls)
        check = made.__init__

        @wraps(check)
        def __init__(self: T, /, **values: object) -> None:
            try:
                check(self, **values)
            except ValidationError as error:
                raise _refused(name, made.__pydantic_fields__, values, error) from None

        made.__init__ = __init__
        found: type[T] = made
        return found

    return make


def _unicode(text: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("it holds bytes that are no UTF-8")
    return text


def _int64(number: int) -> int:
    if number >= 2**63:
        raise ValueError("it does not fit into 64 bits")
    return number


UNICODE = AfterValidator(_unicode)
"""Takes text without lone surrogates, which could not be written back.

Bytes of the command line that are no UTF-8 arrive as such.
"""

INT64 = AfterValidator(_int64)
"""Takes integers below 2**63, which tensors and files can hold."""


def listed(value: object) -> object:
    """A list as a tuple, anything else as it is: a set would differ in order between ranks."""
    return tuple(value) if isinstance(value, list) else value


def one_or_listed(value: object) -> object:
    """A text that is not empty as a list of it; anything else as `listed` has it."""
    return (value,) if isinstance(value, str) and value else listed(value)


def shown(value: object) -> str:
    """A value as an error shows it: its `repr`, cut where that is long."""
    try:
        text = repr(value)
    except ValueError:
        text = "an integer of more digits than Python writes"
    return text if len(text) <= 200 else f"{text[:200]}..."


def toml_value(value: object) -> str:
    """A scalar, or a tuple or list of scalars, as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


def _refused(
    name: str, known: Mapping[str, Any], values: Mapping[str, object], error: ValidationError
) -> ConfigError:
    """What pydantic has found, for all keys of the section together, each behind its name."""
    problems: dict[str, list[str]] = {}
    for one in error.errors(include_url=False):
        key, *inside = one["loc"]
        # Of a list, which item; of a union, pydantic names the kind instead.
        place = f"item {inside[0]}: " if inside and isinstance(inside[0], int) else ""
        problems.setdefault(str(key), []).append(place + one["msg"])
    names = {key: f"{name}.{key.rstrip('_')}".lstrip(".") for key in problems}
    whys, fixes = [], []
    for key, found in problems.items():
        help = known[key].description or "" if key in known else ""
        whys.append(f"{names[key]}: {' or '.join(found)}. {' '.join(help.split())}".rstrip())
        if key not in known:
            fixes.append(near_misses(key, known))
        elif isinstance(default := known[key].default, str | int | float | tuple):
            fixes.append(f"Write for example `{names[key]} = {toml_value(default)}`.")
        else:
            fixes.append(f"Give {names[key]} such a value.")
    return ConfigError(
        ", ".join(names.values()),
        found="the value " + ", ".join(shown(values.get(key)) for key in problems),
        why="\n".join(whys),
        fix="\n".join(fixes),
    )
