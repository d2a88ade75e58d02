"""The language of a family's configuration table: their fields and our keys.

Every field of their configuration is used, or has the one value that is supported, or is listed
as without effect on the numbers of the model. What is none of these is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration.config_resolved import ResolvedModel

__all__ = ["Field", "Fixed", "Same", "Together", "count_of", "refused"]

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Same:
    """One field that is one key.

    Attributes:
        theirs: Name of their field.
        ours: Name of our key in `[model]`.
        default: Value where the field is absent; None if it must be there.
    """

    theirs: str
    ours: str
    default: int | float | bool | str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of theirs."""
        return (self.theirs,)

    def read(self, their: Values) -> dict[str, Any]:
        """Our keys."""
        value = their.get(self.theirs)
        if value is None:
            value = self.default
        if value is None:
            value = count_of(their, self.theirs)
        return {self.ours: value}

    def write(self, model: ResolvedModel) -> dict[str, Any]:
        """Their fields."""
        return {self.theirs: getattr(model, self.ours)}


@dataclass(frozen=True)
class Fixed:
    """A field of which one value is supported.

    Attributes:
        theirs: Name of their field.
        value: The supported value.
        absent: Value that stands for an absent field; the supported one by default.
        is_written: False for a field that transformers' own configuration does not have.
    """

    theirs: str
    value: Any
    absent: Any = ...
    is_written: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of theirs."""
        return (self.theirs,)

    def read(self, their: Values) -> dict[str, Any]:
        """Nothing, or an error."""
        absent = self.value if self.absent is ... else self.absent
        value = their.get(self.theirs, absent)
        if isinstance(value, bool) != isinstance(self.value, bool) or value != self.value:
            raise refused(self.theirs, value, f"{self.value!r}")
        return {}

    def write(self, model: ResolvedModel) -> dict[str, Any]:
        """Their fields."""
        return {self.theirs: self.value} if self.is_written else {}


@dataclass(frozen=True)
class Together:
    """Fields that are converted by functions, which are inverse to each other.

    Attributes:
        names: Fields of theirs that `from_theirs` looks at.
        from_theirs: Function of their configuration that returns keys of ours.
        to_theirs: Function of our model that returns fields of theirs.
    """

    names: tuple[str, ...]
    from_theirs: Callable[[Values], dict[str, Any]]
    to_theirs: Callable[[ResolvedModel], dict[str, Any]]

    def read(self, their: Values) -> dict[str, Any]:
        """Our keys."""
        return self.from_theirs(their)

    def write(self, model: ResolvedModel) -> dict[str, Any]:
        """Their fields."""
        return self.to_theirs(model)


Field = Same | Fixed | Together


def count_of(their: Values, name: str, default: int | None = None, *, least: int = 1) -> int:
    """The whole number in a field.

    Args:
        their: Their configuration.
        name: Name of the field.
        default: Value where the field is absent or null; None if it must be there.
        least: Smallest sound value.

    Raises:
        ConfigError: The field is absent, or no such number.
    """
    value = their.get(name)
    if value is None:
        value = default
    if type(value) is not int or value < least:
        raise ConfigError(
            f"config.json: {name}",
            found="no such field" if value is None else f"the value {value!r:.200}",
            why=f"It is a whole number of at least {least}, and the shape of the model follows "
            "from it.",
            fix="Copy config.json again from where the directory came from.",
        )
    return value


def refused(name: str, value: object, supported: str) -> UnsupportedError:
    """The error that a field has a value which this package does not compute."""
    return UnsupportedError(
        f"config.json: {name}",
        found=f"the value {value!r:.200}",
        why=f"The model would compute something else: supported is {supported}.",
        fix="Use another model, or transformers for this one.",
    )
