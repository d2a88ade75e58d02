"""Which units a parameter has: those under its name, or under a pattern such as `*.qkv.weight`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pcomm.core.errors import ConfigError
from pcomm.ntp.planning.units import Units

__all__ = ["find_units"]


def find_units(units: Sequence[tuple[str, Units]], name: str) -> tuple[str, Units] | None:
    """The key and the units of the parameter `name`; None if no key is or matches it.

    Args:
        units: Pairs of a key and its units. A key is a name, or a pattern of `fnmatch` in which
            `*` stands for any characters, `?` for one, and `[ab]` for one of several.
        name: Name of a parameter, or a key itself. A key that equals it comes before patterns.

    Returns:
        The first of the patterns that match, if they all say the same.

    Raises:
        ConfigError: Two patterns match and say different things.
    """
    for key, own in units:
        if key == name:
            return key, own
    found = [(key, own) for key, own in units if fnmatchcase(name, key)]
    for key, own in found[1:]:
        if own != found[0][1]:
            raise ConfigError(
                f"Plan.units_of: {name!r}",
                found=f"{found[0][0]!r} says {found[0][1]}, and {key!r} says {own}",
                why="A parameter is split in one way, and both patterns match its name.",
                fix=f"Narrow one of the patterns, or add {name!r} itself, which comes before both.",
            )
    return found[0] if found else None
