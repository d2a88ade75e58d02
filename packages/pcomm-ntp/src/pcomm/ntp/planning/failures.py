"""Ranks that are gone, named by coordinates, by global rank, by text, or by a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError, TopologyError, near_misses
from pcomm.core.topology import Topology

__all__ = ["Coord", "Failures"]


@dataclass(frozen=True, init=False, repr=False)
class Coord:
    """The position of one rank on named axes, such as `Coord(dp=3, pp=0, tp=5)`.

    Args:
        axes: Coordinate on each axis, counted from 0. An axis of size 1 may be left out.
    """

    axes: tuple[tuple[str, int], ...]

    # Positional, so that no name of an axis is taken.
    def __init__(self, /, **axes: int) -> None:
        object.__setattr__(self, "axes", tuple(sorted(axes.items())))

    def __str__(self) -> str:
        return ",".join(f"{axis}={value}" for axis, value in self.axes)

    def __repr__(self) -> str:
        return f"Coord({', '.join(f'{axis}={value}' for axis, value in self.axes)})"

    def __reduce__(self) -> tuple[object, ...]:
        return Coord.parse, (str(self),)

    @classmethod
    def parse(cls, text: str) -> Coord:
        """Read text such as `"dp=3,pp=0,tp=5"`.

        Raises:
            ConfigError: Text that is not a list of `axis=number`, or an axis that occurs twice.
        """
        axes: dict[str, int] = {}
        for item in text.split(","):
            axis, equals, value = (word.strip() for word in item.partition("="))
            if not axis.isidentifier() or not equals or not _is_number(value) or axis in axes:
                raise ConfigError(
                    f"Coord.parse: {text!r}",
                    found=f"the item {item.strip()!r}",
                    why="A coordinate is axis=number for each axis once, joined by commas.",
                    fix="Write it like 'dp=3,pp=0,tp=5'.",
                )
            axes[axis] = int(value)
        return cls(**axes)

    def rank(self, topology: Topology) -> int:
        """The global rank at this position.

        Raises:
            TopologyError: An axis that the topology does not have, an axis of more than one rank
                that is missing here, or a coordinate outside its axis.
        """
        given = dict(self.axes)
        for axis in given:
            if axis not in topology.axes:
                raise TopologyError(
                    f"Failures: {axis!r} in {self!r}",
                    found=f"axes {', '.join(f'{a}={n}' for a, n in topology.axes.items())}",
                    why="A failed rank is named by its coordinates on the axes of the topology.",
                    fix=near_misses(axis, topology.axes),
                )
        missing = [a for a, size in topology.axes.items() if size > 1 and a not in given]
        if missing:
            raise TopologyError(
                f"Failures: {self!r}",
                found=f"no coordinate for {', '.join(missing)}",
                why="Only an axis of size 1 may be left out: otherwise several ranks are meant.",
                fix=f"Add {missing[0]}=0 to {missing[0]}={topology.axes[missing[0]] - 1}.",
            )
        return topology.rank({axis: given.get(axis, 0) for axis in topology.axes})


@dataclass(frozen=True)
class Failures:
    """Failed ranks, as they were named; `ranks` looks them up in a topology.

    Args:
        coords: Failed ranks that are named by coordinates.
        global_ranks: Failed ranks that are named by number.
    """

    coords: tuple[Coord, ...] = ()
    global_ranks: tuple[int, ...] = ()

    @classmethod
    def at(cls, *coords: Coord) -> Failures:
        """Failures at coordinates."""
        return cls(coords=coords)

    @classmethod
    def from_global_ranks(cls, ranks: Iterable[int]) -> Failures:
        """Failures of ranks by number."""
        return cls(global_ranks=tuple(ranks))

    @classmethod
    def parse(cls, *texts: str) -> Failures:
        """Failures from texts such as `"dp=3,pp=0,tp=5"`, one rank each; a number is a global rank.

        Raises:
            ConfigError: Text of another form.
        """
        numbers = tuple(int(text) for text in texts if _is_number(text.strip()))
        coords = tuple(Coord.parse(text) for text in texts if not _is_number(text.strip()))
        return cls(coords, numbers)

    @classmethod
    def from_json(cls, source: str | Path) -> Failures:
        """Failures from JSON: a list of global ranks, texts, and objects of coordinates.

        Args:
            source: JSON text, or a `Path` to a file of it, such as `[17, "dp=3,tp=5", {"dp": 1}]`.

        Raises:
            ConfigError: No JSON, or an entry of another form.
            OSError: The file cannot be read.
        """
        try:
            text = source.read_text() if isinstance(source, Path) else source
            entries = json.loads(text)
        except ValueError as error:  # also of a file that is no text
            raise _not_failures(f"no JSON: {error}") from error
        if not isinstance(entries, list):
            raise _not_failures(f"a {type(entries).__name__} at the top")
        found = cls()
        for entry in entries:
            if isinstance(entry, str):
                more = cls.parse(entry)
            elif _is_count(entry):
                more = cls(global_ranks=(entry,))
            elif isinstance(entry, dict) and entry and all(map(_is_count, entry.values())):
                more = cls(coords=(Coord(**entry),))
            else:
                raise _not_failures(f"the entry {entry!r}")
            found = cls(found.coords + more.coords, found.global_ranks + more.global_ranks)
        return found

    def to_json(self) -> str:
        """JSON text that `from_json` reads."""
        return json.dumps([*self.global_ranks, *(dict(coord.axes) for coord in self.coords)])

    def ranks(self, topology: Topology) -> frozenset[int]:
        """The failed global ranks; a rank that is named twice is one failure.

        Raises:
            TopologyError: A rank or a coordinate that the topology does not have.
        """
        for rank in self.global_ranks:
            topology.coordinates(rank)
        return frozenset(self.global_ranks) | {coord.rank(topology) for coord in self.coords}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _not_failures(found: str) -> ConfigError:
    return ConfigError(
        "Failures.from_json",
        found=found,
        why="Failures are a list of global ranks, of texts, and of objects of coordinates.",
        fix='Write them like [17, "dp=3,pp=0,tp=5", {"dp": 3, "pp": 0, "tp": 6}].',
    )
