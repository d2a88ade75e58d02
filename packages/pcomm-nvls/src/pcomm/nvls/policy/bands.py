"""Rows of the table, and bands of them: the rows for some architectures, operations and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pcomm.core.errors import ConfigError, near_misses
from pcomm.nvls.policy.operations import ALGORITHMS, OPERATIONS, Algorithm
from pcomm.nvls.workspace.regions import MAX_BLOCKS

__all__ = ["Band", "Row"]

_WARPS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Row:
    """A threshold: up to which size an algorithm is preferred to the rows after it.

    Args:
        algorithm: Algorithm of the row; `dist` where torch.distributed is known to be faster.
        max_bytes: Size of the largest message in bytes, inclusive.
        num_blocks: Number of CTAs, 1 to 32; 0 for `dist`.
        num_warps: Number of warps of each CTA, a power of two up to 32; 0 for `dist`.
        source: Origin of the numbers, for people.

    Raises:
        ConfigError: An unknown algorithm, or numbers outside of these ranges.
    """

    algorithm: Algorithm
    max_bytes: int
    num_blocks: int
    num_warps: int
    source: str

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            found = f"algorithm {self.algorithm!r}"
            fix = near_misses(self.algorithm, ALGORITHMS)
        elif self.max_bytes < 0:
            found, fix = f"max_bytes={self.max_bytes}", "Give a size in bytes, from 0 on."
        elif self.algorithm == "dist" and (self.num_blocks or self.num_warps):
            found = f"num_blocks={self.num_blocks}, num_warps={self.num_warps} for dist"
            fix = "Give 0 for both: torch.distributed launches by itself."
        elif self.algorithm != "dist" and not 1 <= self.num_blocks <= MAX_BLOCKS:
            found, fix = f"num_blocks={self.num_blocks}", f"Give 1 to {MAX_BLOCKS} blocks."
        elif self.algorithm != "dist" and self.num_warps not in _WARPS:
            found, fix = f"num_warps={self.num_warps}", f"Give one of {_WARPS}."
        else:
            return
        raise ConfigError(
            f"Row of {self.algorithm!r}",
            found=found,
            why="A row is a launch of one algorithm for messages up to a size.",
            fix=fix,
        )

    def spelled(self) -> str:
        """The row in one word, without its source."""
        return f"{self.algorithm}<={self.max_bytes}:{self.num_blocks}x{self.num_warps}"


@dataclass(frozen=True)
class Band:
    """The rows for some architectures, operations and numbers of ranks, fastest first.

    Args:
        architectures: Architectures such as `sm_90`.
        operations: Names of operations.
        world_sizes: Least and largest number of ranks, both inclusive.
        rows: Rows in the order in which they are tried.

    Raises:
        ConfigError: Unknown operations, an empty range, a row that is never reached, or one whose
            blocks have fewer threads than there may be ranks, which its barriers need.
    """

    architectures: tuple[str, ...]
    operations: tuple[str, ...]
    world_sizes: tuple[int, int]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        least, largest = self.world_sizes
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if not (self.architectures and self.operations):
            found, fix = "no architecture or no operation", "Name at least one of each."
        elif unknown:
            found, fix = f"operation {unknown[0]!r}", near_misses(unknown[0], OPERATIONS)
        elif not 2 <= least <= largest:
            found = f"world sizes {least} to {largest}"
            fix = "Give the least and the largest number of ranks, from 2 on."
        elif (hidden := self._hidden()) is not None:
            found = f"row {hidden.spelled()} after a row of {hidden.algorithm} that is as large"
            fix = f"Give the rows of {hidden.algorithm} with ascending max_bytes."
        elif (narrow := self._narrow()) is not None:
            found = f"row {narrow.spelled()} for {largest} ranks"
            fix = f"Give {narrow.algorithm} a thread for each rank: 32 in each of num_warps."
        else:
            return
        raise ConfigError(
            f"Band of {', '.join(self.operations)} on {', '.join(self.architectures)}",
            found=found,
            why="The first row that fits is taken, so each row has to be reached, and can be run.",
            fix=fix,
        )

    def _hidden(self) -> Row | None:
        largest: dict[Algorithm, int] = {}
        for row in self.rows:
            if row.max_bytes <= largest.get(row.algorithm, -1):
                return row
            largest[row.algorithm] = row.max_bytes
        return None

    def _narrow(self) -> Row | None:
        """A row with a barrier whose blocks have fewer threads than there may be ranks."""
        for row in self.rows:
            # Thread r of a block signals rank r and waits for it.
            if row.algorithm in ("multimem", "p2p") and 32 * row.num_warps < self.world_sizes[1]:
                return row
        return None

    def without(
        self, architecture: str, operation: str, world_sizes: tuple[int, int]
    ) -> tuple[Band, ...]:
        """What is left of the band when an operation on some numbers of ranks is taken out.

        Args:
            architecture: Architecture that is taken out.
            operation: Operation that is taken out there.
            world_sizes: Least and largest number of ranks that are taken out, both inclusive.
        """
        (least, largest), (cut_least, cut_largest) = self.world_sizes, world_sizes
        outside = cut_largest < least or largest < cut_least
        if outside or architecture not in self.architectures or operation not in self.operations:
            return (self,)
        others = tuple(name for name in self.architectures if name != architecture)
        kept = tuple(name for name in self.operations if name != operation)
        left = []
        if others:
            left.append(replace(self, architectures=others))
        one = replace(self, architectures=(architecture,))
        if kept:
            left.append(replace(one, operations=kept))
        one = replace(one, operations=(operation,))
        if least < cut_least:
            left.append(replace(one, world_sizes=(least, cut_least - 1)))
        if cut_largest < largest:
            left.append(replace(one, world_sizes=(cut_largest + 1, largest)))
        return tuple(left)
