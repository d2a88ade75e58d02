"""The table of thresholds: which rows count for an architecture, an operation and a group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.nvls.policy.bands import Band, Row
from pcomm.nvls.policy.table_file import read_bands, write_bands

__all__ = ["Table"]

_SHIPPED = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Table:
    """Bands of rows that do not overlap.

    Args:
        bands: Bands; no two of them have an architecture, an operation and a number of ranks in
            common.
        about: Text for people that says how far the numbers can be trusted.

    Raises:
        ConfigError: Bands overlap.
    """

    bands: tuple[Band, ...]
    about: str = ""
    _index: dict[tuple[str, str], list[Band]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for band in self.bands:
            for architecture, operation in product(band.architectures, band.operations):
                self._add(band, architecture, operation)

    def _add(self, band: Band, architecture: str, operation: str) -> None:
        beside = self._index.setdefault((architecture, operation), [])
        least, largest = band.world_sizes
        for other in beside:
            if least <= other.world_sizes[1] and other.world_sizes[0] <= largest:
                ranges = [f"{one} to {last}" for one, last in (other.world_sizes, (least, largest))]
                raise ConfigError(
                    f"Table: {operation} on {architecture}",
                    found=f"bands for {' and for '.join(ranges)} ranks",
                    why="A number of ranks in both would have two lists of thresholds.",
                    fix="Remove one of them, or give ranges that do not overlap.",
                )
        beside.append(band)

    @classmethod
    def load(cls, path: str | Path | None = None) -> Table:
        """Read a table. Local.

        Args:
            path: Path of a JSON file; None for the one in the package.

        Raises:
            ConfigError: The file cannot be read, or something in it is unknown or contradictory.
        """
        about, bands = read_bands(_SHIPPED if path is None else Path(path))
        return cls(bands, about)

    def dump(self, path: str | Path) -> None:
        """Write the table as JSON, in one step: readers see the old file or the new one. Local.

        Raises:
            OSError: The file cannot be written.
        """
        write_bands(Path(path), self.about, self.bands)

    def rows(self, architecture: str, operation: str, world_size: int) -> tuple[Row, ...]:
        """The rows that count there, fastest first; none if the table has no band for it."""
        for band in self._index.get((architecture, operation), ()):
            if band.world_sizes[0] <= world_size <= band.world_sizes[1]:
                return band.rows
        return ()

    def with_rows(
        self,
        architecture: str,
        operation: str,
        world_sizes: tuple[int, int],
        rows: Sequence[Row],
    ) -> Table:
        """A table with other rows at one place, and the same ones everywhere else.

        Args:
            architecture: Architecture of the place.
            operation: Operation of the place.
            world_sizes: Least and largest number of ranks of the place, both inclusive.
            rows: Rows in the order in which they are tried.

        Raises:
            ConfigError: The rows make no band, see `Band`.
        """
        new = Band((architecture,), (operation,), world_sizes, tuple(rows))
        cut: Iterable[tuple[Band, ...]] = (
            band.without(architecture, operation, world_sizes) for band in self.bands
        )
        return Table((*(band for left in cut for band in left), new), self.about)

    def lines(self, architecture: str, world_size: int) -> list[str]:
        """The rows of every operation there, a line each, in an order of their own."""
        places = sorted(place for place in self._index if place[0] == architecture)
        return [
            f"{operation}: {' '.join(row.spelled() for row in rows)}"
            for _, operation in places
            if (rows := self.rows(architecture, operation, world_size))
        ]

    @cached_property
    def digest(self) -> str:
        """A short digest of all that choices depend on: not of `about`, sources and order."""
        lines = sorted(
            f"{place} {band.world_sizes} {' '.join(row.spelled() for row in band.rows)}"
            for place, bands in self._index.items()
            for band in bands
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
