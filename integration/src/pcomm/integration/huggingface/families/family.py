"""What the table of a family is made of: fields of `config.json`, tensors, and the family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration.config.model_rules import mixers
from pcomm.integration.config.sections import ResolvedModel

__all__ = [
    "Entry",
    "Family",
    "Field",
    "FieldGroup",
    "Fixed",
    "Part",
    "RowRange",
    "Same",
    "TensorMap",
    "count_of",
    "map_tensors",
    "refused",
]


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
class FieldGroup:
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


Field = Same | Fixed | FieldGroup


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


# Shape suffixes: R rows of a parameter.


Count = Callable[[ResolvedModel], int]
"""A number that follows from the shape of the model."""


@dataclass(frozen=True)
class Part:
    """Rows of one tensor of theirs that are consecutive rows of ours.

    Theirs may hold groups of `stride` rows, one for each head, of which a part takes the same
    rows of each: that is how queries and gates of one head lie next to each other.

    Attributes:
        theirs: Name of their tensor, with `{layer}` and `{expert}` for the numbers.
        rows: Rows that the part takes of each group; None for all rows of ours, which is then the
            only part.
        groups: Number of groups.
        offset: First row that the part takes of a group.
        stride: Rows of a group in their tensor; None for as many as the part takes.
    """

    theirs: str
    rows: Count | None = None
    groups: Count = field(default=lambda config: 1)
    offset: Count = field(default=lambda config: 0)
    stride: Count | None = None


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, or one of each block.

    Attributes:
        ours: Name of our parameter, with `{layer}` for the number of the block.
        parts: Rows that it consists of, in order. With `{expert}` in their names they are repeated
            for each expert.
        mixer: Letters of the mixers in whose blocks it is.
        middle: Dimensions of length 1 that theirs has behind the rows and ours has not, as the
            weight of a convolution.
    """

    ours: str
    parts: tuple[Part, ...]
    mixer: str = "AGM"
    middle: int = 0


class RowRange(NamedTuple):
    """Consecutive rows of ours that are consecutive rows of one tensor of theirs."""

    start: int
    """First row of ours."""

    theirs: str
    """Name of their tensor."""

    their_start: int
    """First row of theirs."""

    length: int
    """Number of rows."""


@dataclass(frozen=True)
class TensorMap:
    """The table of a family for one model; see `map_tensors`.

    Attributes:
        segments: Segments of each parameter of ours, in the order of its rows.
        shapes: Shape of each tensor of theirs.
        users: Segments of each tensor of theirs, each with the name of our parameter.
        middles: Tensors of theirs with dimensions of length 1 behind the rows.
    """

    segments: Mapping[str, tuple[RowRange, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    users: Mapping[str, tuple[tuple[str, RowRange], ...]]
    middles: frozenset[str]


def map_tensors(
    table: Sequence[Entry], config: ResolvedModel, shapes: Mapping[str, Sequence[int]]
) -> TensorMap:
    """Apply the table of a family to the parameters of one model. Local; integers only.

    Args:
        table: The table of the family.
        config: The shape of the model.
        shapes: Logical shape of each parameter of ours, by name.

    Raises:
        KeyError: The table has no entry for a parameter: a mistake in the table.
    """
    letters, segments = mixers(config), {}
    rows_of: dict[str, int] = {}
    tails: dict[str, tuple[int, ...]] = {}
    users: dict[str, list[tuple[str, RowRange]]] = {}
    middles = set()
    for name, shape in shapes.items():
        entry, layer = _find(table, name, letters)
        segments[name] = tuple(_segments(entry, layer, config, shape))
        tail = (1,) * entry.middle + tuple(shape[1:] if len(shape) < 3 else shape[-1:])
        for segment in segments[name]:
            theirs = segment.theirs
            rows_of[theirs] = rows_of.get(theirs, 0) + segment.length
            tails[theirs] = tail
            users.setdefault(theirs, []).append((name, segment))
            if entry.middle:
                middles.add(theirs)
    return TensorMap(
        segments,
        {theirs: (rows_of[theirs], *tails[theirs]) for theirs in tails},
        {theirs: tuple(parts) for theirs, parts in users.items()},
        frozenset(middles),
    )


def _find(table: Sequence[Entry], name: str, letters: str) -> tuple[Entry, int]:
    """The entry of a parameter, and the number of its block."""
    match = re.match(r"blocks\.(\d+)\.", name)
    layer = int(match[1]) if match else -1
    general = f"blocks.{{layer}}.{name[match.end() :]}" if match else name
    for entry in table:
        if entry.ours == general and (match is None or letters[layer] in entry.mixer):
            return entry, layer
    raise KeyError(f"no entry of the table is for {name}")


def _segments(
    entry: Entry, layer: int, config: ResolvedModel, shape: Sequence[int]
) -> list[RowRange]:
    per_expert = "{expert}" in entry.parts[0].theirs
    own_rows = shape[1] if len(shape) == 3 else shape[0]
    found: list[RowRange] = []
    start = 0
    for expert in range(shape[0] if per_expert else 1):
        for part in entry.parts:
            theirs = part.theirs.format(layer=layer, expert=expert)
            rows = own_rows if part.rows is None else part.rows(config)
            stride = rows if part.stride is None else part.stride(config)
            for group in range(part.groups(config)):
                place = group * stride + part.offset(config)
                found.append(RowRange(start, theirs, place, rows))
                start += rows
    expected = own_rows * (shape[0] if len(shape) == 3 else 1)
    assert start == expected, f"{entry.ours}: {start} rows in the table, {expected} in the model"
    return found


@dataclass(frozen=True, eq=False)
class Family:
    """A family of Hugging Face models, as data.

    Attributes:
        model_type: Value of `model_type` in `config.json`.
        architecture: Class of transformers with a language model's head.
        fields: Table of the configuration.
        keys: Keys of `[model]` that have one value in the whole family.
        tensors: Table of the tensors.
        ignored: Regular expressions of tensors that a directory may hold and the model does not
            use.
        ignored_fields: Fields without effect on the numbers, beside those of every family.
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    keys: Mapping[str, Any]
    tensors: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
