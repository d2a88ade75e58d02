"""A family of Hugging Face models as tables: fields of `config.json`, and rows of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration.config.model_rules import mixers
from pcomm.integration.config.sections import ResolvedModel

__all__ = [
    "Family",
    "FieldGroup",
    "Part",
    "RowRange",
    "Source",
    "TensorMap",
    "Values",
    "count_of",
    "damaged",
    "map_tensors",
    "refused",
]

Values = Mapping[str, Any]


class FieldGroup(NamedTuple):
    """Fields that are converted by functions, which are inverse to each other."""

    names: tuple[str, ...]
    """Fields of theirs that `read` alone looks at."""

    read: Callable[[Values], dict[str, Any]]
    """Keys of ours from their configuration."""

    write: Callable[[ResolvedModel], dict[str, Any]]
    """Fields of theirs from our model."""


class Part(NamedTuple):
    """Rows of one tensor of theirs that are consecutive rows of ours.

    With `groups`, theirs holds one group of rows after the other, and a group has the rows of all
    parts of this tensor that a parameter names, in their order: so queries and gates of one head
    lie next to each other.
    """

    theirs: str
    """Name of their tensor in a block, with `{expert}` for the number of an expert."""

    rows: int
    """Rows that the part takes of each group."""

    groups: int = 1
    """Number of groups."""


Source = str | tuple[str, ...] | Callable[[ResolvedModel], tuple[Part, ...]]
"""Where a parameter comes from: a tensor, several with as many rows each, or parts of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A family of Hugging Face models, as data.

    Attributes:
        model_type: Value of `model_type` in `config.json`.
        same: Key of `[model]` that a field is, and its value where the field is absent; None if the
            field must be there.
        fixed: Fields of which one value is supported, which stands for an absent one, too.
        groups: Fields that are converted by functions.
        keys: Keys of `[model]` that have one value in the whole family, other than the default.
        tensors: Source of each parameter of ours. Those of blocks are named without the block, and
            those of a mixer by its letter: `A.qkv.weight`.
        block: Beginning of the names of a block's tensors.
        ignored: Regular expressions of tensors that a directory may hold and the model does not
            use.
        ignored_fields: Fields without effect on the numbers, beside those of every family.
    """

    model_type: str
    same: Mapping[str, tuple[str, int | float | bool | str | None]]
    fixed: Mapping[str, Any]
    groups: tuple[FieldGroup, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Source]
    block: str = "model.layers.{layer}."
    ignored: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """Class of transformers with a language model's head."""
        return self.model_type.title().replace("_", "") + "ForCausalLM"

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that say something of a model."""
        return (*self.same, *self.fixed, *(name for group in self.groups for name in group.names))

    def read(self, their: Values) -> dict[str, tuple[Any, str]]:
        """Keys of ours, each with the field that it is from.

        Raises:
            ConfigError: A field is missing or damaged.
            UnsupportedError: A field has a value that is not supported.
        """
        for name, value in self.fixed.items():
            found = their.get(name, value)
            if type(found) is not type(value) or found != value:
                raise refused(name, found, repr(value))
        ours = {key: (value, "model_type") for key, value in self.keys.items()}
        for name, (key, absent) in self.same.items():
            found = their.get(name)
            found = absent if found is None else found
            ours[key] = (count_of(their, name) if found is None else found, name)
        for group in self.groups:
            ours |= {key: (value, group.names[0]) for key, value in group.read(their).items()}
        return ours

    def write(self, model: ResolvedModel) -> dict[str, Any]:
        """Fields of theirs, which `read` takes for the same model if it is of this family."""
        their = {name: getattr(model, key) for name, (key, _) in self.same.items()}
        for group in self.groups:
            their |= group.write(model)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.fixed,
            **their,
        }


def count_of(their: Values, name: str, default: int | None = None, *, least: int = 1) -> int:
    """The whole number in a field.

    Args:
        their: Fields of the configuration in the directory.
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
        raise damaged(
            name,
            "no such field" if value is None else f"the value {value!r:.200}",
            f"It is a whole number of at least {least}, and the shape of the model follows from "
            "it.",
        )
    return value


def damaged(name: str, found: str, why: str) -> ConfigError:
    """The error that a field, or several, cannot be what the model was saved with."""
    return ConfigError(
        f"config.json: {name}",
        found=found,
        why=why,
        fix="Copy config.json again from where the directory came from.",
    )


def refused(name: str, value: object, supported: str) -> UnsupportedError:
    """The error that a field has a value which this package does not compute."""
    return UnsupportedError(
        f"config.json: {name}",
        found=f"the value {value!r:.200}",
        why=f"The model would compute something else: supported is {supported}.",
        fix="Use another model, or transformers for this one.",
    )


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
    """

    segments: Mapping[str, Sequence[RowRange]]
    shapes: Mapping[str, tuple[int, ...]]
    users: Mapping[str, Sequence[tuple[str, RowRange]]]


def map_tensors(
    family: Family, config: ResolvedModel, shapes: Mapping[str, Sequence[int]]
) -> TensorMap:
    """Apply the table of a family to the parameters of one model. Local; integers only.

    Args:
        family: The family.
        config: The shape of the model.
        shapes: Logical shape of each parameter of ours, by name.

    Raises:
        KeyError: The table has no entry for a parameter: a mistake in the table.
    """
    letters = mixers(config)
    segments: dict[str, list[RowRange]] = {}
    tails: dict[str, tuple[int, ...]] = {}
    users: dict[str, list[tuple[str, RowRange]]] = {}
    for name, shape in shapes.items():
        key, before = name, ""
        if match := re.match(r"blocks\.(\d+)\.", name):
            layer = int(match[1])
            key = re.sub(r"^mixer\.", f"{letters[layer]}.", name[match.end() :])
            before = family.block.format(layer=layer)
        segments[name] = _segments(family.tensors[key], config, shape, before)
        for one in segments[name]:
            users.setdefault(one.theirs, []).append((name, one))
            # torch keeps a dimension for the one channel that a filter of these reads.
            middle = (1,) if one.theirs.endswith("conv1d.weight") else ()
            tails[one.theirs] = (*middle, *shape[max(1, len(shape) - 1) :])
    rows = {theirs: sum(one.length for _, one in parts) for theirs, parts in users.items()}
    return TensorMap(segments, {name: (rows[name], *tails[name]) for name in users}, users)


def _segments(
    source: Source, config: ResolvedModel, shape: Sequence[int], before: str
) -> list[RowRange]:
    # The weights of experts are one parameter, with a first dimension for them.
    experts, rows = (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])
    if callable(source):
        parts = source(config)
    else:
        names = (source,) if isinstance(source, str) else source
        parts = tuple(Part(name, rows // len(names)) for name in names)
    found: list[RowRange] = []
    start = 0
    for expert in range(experts):
        for number, (theirs, count, groups) in enumerate(parts):
            name = before + theirs.format(expert=expert)
            first = sum(part.rows for part in parts[:number] if part.theirs == theirs)
            stride = sum(part.rows for part in parts if part.theirs == theirs)
            for group in range(groups):
                found.append(RowRange(start, name, group * stride + first, count))
                start += count
    assert start == experts * rows, f"{parts}: {start} rows in the table, {rows} in the model"
    return found
