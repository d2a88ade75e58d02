"""The integers of a specification: at least 1, and heads a multiple of those that serve several."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pcomm.core.errors import ConfigError

__all__ = ["check_counts", "is_integer"]


def is_integer(value: object) -> bool:
    """Whether `value` is an integer that counts something: a truth value does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_counts(spec: Any, num_heads: int, num_shared: int) -> None:
    """Refuse a specification whose integers cannot be. Local.

    Args:
        spec: A dataclass with integers only.
        num_heads: Number of heads of its output.
        num_shared: Number of its key heads or groups, each of which serves several of these.

    Raises:
        ConfigError: A field that is no integer >= 1, or heads that are no multiple.
    """
    name = type(spec).__name__
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if not all(is_integer(value) and value >= 1 for value in values.values()):
        raise ConfigError(
            name,
            found=f"{values}",
            why="A mixer has at least one head, column and tap of each kind, in whole numbers.",
            fix="Use integers >= 1, those of one tensor-parallel rank.",
        )
    if num_heads % num_shared:
        raise ConfigError(
            name,
            found=f"{num_heads} heads over {num_shared} shared heads, of {values}",
            why="Every key head or group serves the same number of consecutive heads.",
            fix="Make the number of heads a multiple of that of key heads or groups.",
        )
