"""Sections of a configuration: frozen dataclasses that pydantic checks, with errors of ours."""

from __future__ import annotations

import difflib
import json
import keyword
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import date
from functools import wraps
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from pcomm.core.errors import ConfigError, near_misses

__all__ = [
    "INT64",
    "UNICODE",
    "attribute_of",
    "listed",
    "must_divide",
    "one_or_listed",
    "section",
    "shown",
    "toml_value",
]

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


def attribute_of(key: str) -> str:
    """The dataclass field of a key: its name, with a `_` behind it where that is Python's word."""
    return f"{key}_" if keyword.iskeyword(key) else key


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
    """What pydantic has found, in four parts, for all keys of the section together."""
    problems: dict[str, list[str]] = {}
    for one in error.errors(include_url=False):
        key, *inside = one["loc"]
        # Of a list, which item; of a union, pydantic names the kind instead.
        place = f"item {inside[0]}: " if inside and isinstance(inside[0], int) else ""
        # A file has lists, whatever they become.
        said = one["msg"].replace("a valid tuple", "a list").removeprefix("Value error, ")
        problems.setdefault(str(key), []).append(place + said)
    dot = "." if name else ""
    whys = []
    for key, found in problems.items():
        help = known[key].description or "" if key in known else ""
        key = key.rstrip("_")
        whys.append(f"{name}{dot}{key}: {' or '.join(found)}. {' '.join(help.split())}".rstrip())
    return ConfigError(
        ", ".join(f"{name}{dot}{key.rstrip('_')}" for key in problems),
        found="the value " + ", ".join(shown(values.get(key)) for key in problems),
        why="\n".join(whys),
        fix="\n".join(
            _fix(f"{name}{dot}{key.rstrip('_')}", key, values.get(key), known) for key in problems
        ),
    )


def _fix(full: str, key: str, value: object, known: Mapping[str, Any]) -> str:
    if key not in known:
        return near_misses(key, known)
    info = known[key]
    if isinstance(info.annotation, type) and is_dataclass(info.annotation):
        return f"Pass `{key}={info.annotation.__name__}(...)`, with the keys to change."
    words = _words(info.annotation)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if words and is_number and value == 0:
        return f'Write `{full} = "{words[0]}"`, which is what 0 stood for in earlier files.'
    example = default = 1 if info.is_required() else info.default
    choices = words or get_args(info.annotation)
    if isinstance(value, str) and default == ():
        example = [value]
    elif isinstance(value, str) and (words or isinstance(default, str)):
        example = next(iter(difflib.get_close_matches(value.lower(), choices, n=1)), default)
    elif UNICODE in info.metadata and isinstance(value, bool | int | float | date):
        example = str(value) if isinstance(value, date) else shown(value).lower()
    return f"Write for example `{full} = {toml_value(example)}`."


def _words(annotation: object) -> list[str]:
    """Words that stand beside the numbers of a type, such as `auto`."""
    parts = [part for part in get_args(annotation) if get_origin(part) is Literal]
    return [word for part in parts for word in get_args(part)]


def must_divide(asked: str, whole: tuple[str, int], parts: tuple[str, int], why: str) -> None:
    """Refuse a size that is no multiple of another one; local.

    Args:
        asked: Name of the key, for the error.
        whole: Name and value of the size.
        parts: Name and value of what has to divide it.
        why: The reason, for the error.
    """
    (whole_name, size), (parts_name, count) = whole, parts
    if size % count:
        down, up = size // count * count, -(-size // count) * count
        nearest = f"{down} or {up}" if down else f"{up}"
        raise ConfigError(
            asked,
            found=f"{whole_name} is {size}, {parts_name} is {count}, and {size} is no multiple "
            f"of {count}",
            why=why,
            fix=f"Change one of the two; for {count} the nearest is {nearest}.",
        )
