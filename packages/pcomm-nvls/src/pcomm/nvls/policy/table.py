"""The operations, and the table of sizes up to which an algorithm is preferred for each.

The table is for orientation and not measured: no row comes from a run of these kernels on a GPU.
Lamport rows come from a model of others' constants, multimem rows from others' figures, p2p rows
from neither. docs/decisions/0022-choice-of-the-algorithm.md has the derivation. Sizes are bytes of
the message as the operation defines it.

Whether an all-reduce takes one step or two is no row: see `is_one_shot` of the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from pcomm.core.errors import ConfigError, near_misses

__all__ = [
    "ALGORITHMS",
    "MAX_BLOCKS",
    "OPERATIONS",
    "Algorithm",
    "Band",
    "OperationTraits",
    "Table",
    "Threshold",
    "operation_named",
]

MAX_BLOCKS = 32
"""Most thread blocks of a launch: each has a row of signals."""

_WARPS = (1, 2, 4, 8, 16, 32)

Algorithm = Literal["lamport", "multimem", "p2p", "dist"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class OperationTraits:
    """An operation with the facts about its kernels that a choice depends on.

    Args:
        name: Name of the host function in `pcomm.nvls.collectives`.
        message: Noun phrase for what `CollectiveRequest.num_bytes` counts; the same number on
            all ranks.
        reduces: True if values are added, so that data type and order of the sum matter.
        is_segment: True if the message is one of `world_size` segments, False if it is the whole
            tensor.
        algorithms: Algorithms that have a kernel for it.
        dims: Dimensions along which a kernel joins or splits: 0, or 0 and the last one, -1.
    """

    name: str
    message: str
    reduces: bool
    is_segment: bool
    algorithms: tuple[Algorithm, ...] = ("lamport", "multimem", "p2p")
    dims: tuple[int, ...] = (0,)

    def slot_bytes(self, algorithm: Algorithm, num_bytes: int, world_size: int) -> int:
        """Bytes of a slot that an algorithm needs, on every rank.

        The slot holds the whole tensor.

        Args:
            algorithm: Algorithm that runs; `dist` needs no slot, and `lamport` has other memory.
            num_bytes: Size of the message in bytes, as `message` says.
            world_size: Number of ranks of the group.
        """
        if algorithm in ("dist", "lamport"):
            return 0
        return world_size * num_bytes if self.is_segment else num_bytes


_ALL = (
    OperationTraits(
        "all_gather_into_tensor",
        "the input of one rank",
        reduces=False,
        is_segment=True,
        dims=(0, -1),
    ),
    OperationTraits(
        "all_gather_coalesced",
        "the inputs of one rank, all tensors together",
        reduces=False,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    OperationTraits(
        "all_gather_v",
        "the largest input that a rank may have",
        reduces=False,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    OperationTraits(
        "gather_to_rank",
        "the input of one rank",
        reduces=False,
        is_segment=True,
        # Not `lamport`: it needs data of every rank on every rank.
        algorithms=("p2p",),
        dims=(0, -1),
    ),
    OperationTraits(
        "reduce_scatter_tensor",
        "the output of one rank",
        reduces=True,
        is_segment=True,
        dims=(0, -1),
    ),
    OperationTraits(
        "reduce_scatter_v",
        "the largest output that a rank may have",
        reduces=True,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    OperationTraits("all_reduce", "the whole tensor", reduces=True, is_segment=False),
    OperationTraits(
        "reduce_scatter_add_rmsnorm_all_gather",
        "the rows that one rank normalises",
        reduces=True,
        is_segment=True,
        algorithms=("multimem", "p2p"),
    ),
    OperationTraits(
        "all_reduce_add_rmsnorm",
        "the whole tensor",
        reduces=True,
        is_segment=False,
        algorithms=("multimem", "p2p"),
    ),
)
OPERATIONS = MappingProxyType({operation.name: operation for operation in _ALL})


def operation_named(name: str) -> OperationTraits:
    """The operation of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in OPERATIONS:
        raise ConfigError(
            f"operation {name!r}",
            found="no operation of pcomm-nvls",
            why="The choice depends on what an operation moves and on the kernels that it has.",
            fix=near_misses(name, OPERATIONS),
        )
    return OPERATIONS[name]


@dataclass(frozen=True)
class Threshold:
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
    rows: tuple[Threshold, ...]

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

    def _hidden(self) -> Threshold | None:
        largest: dict[Algorithm, int] = {}
        for row in self.rows:
            if row.max_bytes <= largest.get(row.algorithm, -1):
                return row
            largest[row.algorithm] = row.max_bytes
        return None

    def _narrow(self) -> Threshold | None:
        """A row with a barrier whose blocks have fewer threads than there may be ranks."""
        for row in self.rows:
            # Thread r of a block signals rank r and waits for it.
            if row.algorithm in ("multimem", "p2p") and 32 * row.num_warps < self.world_sizes[1]:
                return row
        return None


# -- the table of the package --------------------------------------------------------------------

_GATHERS = ("all_gather_into_tensor", "all_gather_coalesced", "all_gather_v", "gather_to_rank")
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_v", "reduce_scatter_add_rmsnorm_all_gather")
_REDUCES = ("all_reduce", "all_reduce_add_rmsnorm")
_HOPPER, _BLACKWELL = ("sm_90",), ("sm_100", "sm_103")
# Least and largest number of ranks, and the origin of the sizes of multimem.
_WORLDS = (
    (2, 2, "no figure; by name alone, since 2 ranks gain nothing"),
    (3, 4, "TokenWeave figure_5, 8 H100, scaled by the bytes of 4 ranks"),
    (5, 8, "TokenWeave figure_5, 8 H100"),
    (9, 72, "TokenWeave figure_5, 8 H100, the same whole tensor on 72 ranks"),
)
# The times of NCCL's model, without and with a barrier, and the largest sizes of lamport, multimem
# and p2p in KiB, for each number of ranks of `_WORLDS`. Up to 1 MiB multimem takes fewer blocks.
_PREFERRED = (
    (_HOPPER, _GATHERS, "4.5 us against 7.8 us, flags at 371 GB/s",
     (512, 256, 128, 16), (1024, 8192, 16384, 2048), (4096, 2048, 1024, 64)),
    (_HOPPER, _SCATTERS, "4.5 us against 7.8 us, flags at 371 GB/s",
     (512, 256, 128, 16), (1024, 4096, 8192, 1024), (4096, 2048, 1024, 64)),
    (_HOPPER, _REDUCES, "4.5 us against 7.8 us, flags at 371 GB/s",
     (256, 128, 64, 8), (1024, 65536, 524288, 524288), (8192, 8192, 8192, 4096)),
    (_BLACKWELL, _GATHERS, "8.5 us against 13 us, flags at 722 GB/s",
     (1024, 512, 256, 32), (1024, 8192, 16384, 2048), (4096, 2048, 1024, 64)),
    (_BLACKWELL, _SCATTERS, "11 us against 13 us, flags at 722 GB/s",
     (512, 256, 128, 16), (1024, 4096, 8192, 1024), (4096, 2048, 1024, 64)),
    (_BLACKWELL, _REDUCES, "11 us against 19.5 us, flags at 722 GB/s",
     (2048, 512, 256, 32), (1024, 65536, 524288, 524288), (8192, 8192, 8192, 4096)),
)  # fmt: skip


def _shipped() -> Iterator[Band]:
    for architectures, operations, model, *sizes in _PREFERRED:
        for (least, most, figure), lamport, multimem, p2p in zip(_WORLDS, *sizes, strict=True):
            model_of = f"model: NCCL's sym_kernels.cc, {model}, {most} ranks"
            if architectures == _BLACKWELL and most > 2:
                figure += "; no figure for this architecture"
            rows = [
                Threshold("lamport", lamport << 10, 4, 8, model_of),
                Threshold("multimem", 1 << 20, 8, 16, figure),
                Threshold("p2p", p2p << 10, 16, 16, "no figure; whole tensors up to about 8 MiB"),
            ]
            if multimem > 1024:
                rows.insert(2, Threshold("multimem", multimem << 10, 16, 16, figure))
            yield Band(architectures, operations, (least, most), tuple(rows))
    small = "none: small, so that tests reach both sides"
    rows = [Threshold("lamport", 1024, 2, 4, small), Threshold("multimem", 2048, 2, 4, small)]
    rows += [Threshold("multimem", 4096, 4, 4, small), Threshold("p2p", 8192, 4, 4, small)]
    every = (*_GATHERS, *_SCATTERS, *_REDUCES)
    yield Band(("emulated",), every, (2, 72), tuple(rows))


_SHIPPED = tuple(_shipped())


@dataclass(frozen=True)
class Table:
    """Bands of rows. Without arguments, those of the package.

    Args:
        bands: Bands; the first one for an architecture, an operation and a number of ranks counts.
            `Table((band, *Table().bands))` is the table of the package with a band of one's own.
    """

    bands: tuple[Band, ...] = _SHIPPED

    def rows(self, architecture: str, operation: str, world_size: int) -> tuple[Threshold, ...]:
        """The rows that count there, fastest first; none if the table has no band for it."""
        for band in self.bands:
            is_there = architecture in band.architectures and operation in band.operations
            if is_there and band.world_sizes[0] <= world_size <= band.world_sizes[1]:
                return band.rows
        return ()

    def lines(self, architecture: str, world_size: int) -> list[str]:
        """The rows of every operation there, a line each."""
        return [
            f"{operation}: {' '.join(row.spelled() for row in rows)}"
            for operation in OPERATIONS
            if (rows := self.rows(architecture, operation, world_size))
        ]
