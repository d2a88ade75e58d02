"""The language of a family's tensor table: which rows of theirs are which rows of ours.

Every parameter of ours is seen as rows, along all dimensions but the last. An `Entry` says that
they are rows of tensors of theirs, one part after the other: queries, keys and values in one
weight, the two halves of a gated MLP, the experts of a layer. So an entry is a permutation of rows,
which has an inverse, and one table serves for reading, for writing and for reading a shard alone.
"""

# Shape suffixes: R rows of a parameter.

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pcomm.integration.config_resolved import ResolvedModel
from pcomm.integration.model_rules import mixers

__all__ = ["Entry", "Part", "Segment", "TensorMap", "map_tensors"]

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


class Segment(NamedTuple):
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

    segments: Mapping[str, tuple[Segment, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    users: Mapping[str, tuple[tuple[str, Segment], ...]]
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
    users: dict[str, list[tuple[str, Segment]]] = {}
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
) -> list[Segment]:
    per_expert = "{expert}" in entry.parts[0].theirs
    own_rows = shape[1] if len(shape) == 3 else shape[0]
    found: list[Segment] = []
    start = 0
    for expert in range(shape[0] if per_expert else 1):
        for part in entry.parts:
            theirs = part.theirs.format(layer=layer, expert=expert)
            rows = own_rows if part.rows is None else part.rows(config)
            stride = rows if part.stride is None else part.stride(config)
            for group in range(part.groups(config)):
                place = group * stride + part.offset(config)
                found.append(Segment(start, theirs, place, rows))
                start += rows
    expected = own_rows * (shape[0] if len(shape) == 3 else 1)
    assert start == expected, f"{entry.ours}: {start} rows in the table, {expected} in the model"
    return found
