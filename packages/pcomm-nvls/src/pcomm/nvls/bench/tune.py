"""Rows of the table from measured times: up to which size each algorithm is the fastest. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pcomm.nvls.bench.ranks import RankTime
from pcomm.nvls.policy.bands import Row
from pcomm.nvls.policy.operations import ALGORITHMS, Algorithm, operation_named
from pcomm.nvls.policy.table import Table

__all__ = ["rows_from_times", "tuned"]

_BASELINE = "torch.distributed"


def tuned(table: Table, architecture: str, times: Sequence[RankTime], *, source: str) -> Table:
    """A table whose rows for the measured operations come from times.

    Operations that were not measured keep their rows, and so do other architectures and numbers
    of ranks.

    Args:
        table: Table so far; grids come from its rows.
        architecture: Architecture of the devices, such as "sm_90".
        times: Times of one number of ranks.
        source: Origin of the times, for the rows.
    """
    by_operation: dict[str, list[RankTime]] = defaultdict(list)
    for time in times:
        if time.operation != "barrier":
            by_operation[time.operation].append(time)
    for operation, found in by_operation.items():
        world = found[0].world
        before = table.rows(architecture, operation, world)
        rows = rows_from_times(operation, found, before, source=source)
        table = table.with_rows(architecture, operation, (world, world), rows)
    return table


def rows_from_times(
    operation: str, times: Sequence[RankTime], before: Sequence[Row], *, source: str
) -> list[Row]:
    """Rows in ascending size: each is the fastest from the row before up to its own size.

    A boundary lies at the last measured size at which the algorithm was the fastest. Where
    torch.distributed is the fastest from some size on, the last row ends before it; where it
    always is, the only row says so.

    Args:
        operation: Name of the operation.
        times: Its times for one number of ranks.
        before: Rows of the table so far, whose grids are kept.
        source: Origin of the times.
    """
    spec = operation_named(operation)
    fastest: list[tuple[int, str]] = []
    for num_bytes in sorted({time.num_bytes for time in times}):
        here = [time for time in times if time.num_bytes == num_bytes]
        best = min(here, key=lambda time: time.microseconds).algorithm
        message = num_bytes // times[0].world if spec.is_segment else num_bytes
        fastest.append((message, best if best in ALGORITHMS else _BASELINE))
    rows: list[Row] = []
    for place, (num_bytes, algorithm) in enumerate(fastest):
        is_last = place + 1 == len(fastest) or fastest[place + 1][1] != algorithm
        if not is_last:
            continue
        if algorithm == _BASELINE:
            if any(other != _BASELINE for _, other in fastest[place + 1 :]):
                rows.append(Row("dist", num_bytes, 0, 0, source))
            continue
        blocks, warps = _grid(algorithm, num_bytes, before)
        name: Algorithm = next(known for known in ALGORITHMS if known == algorithm)
        rows.append(Row(name, num_bytes, blocks, warps, source))
    return rows or [Row("dist", fastest[-1][0], 0, 0, source)]


def _grid(algorithm: str, num_bytes: int, before: Sequence[Row]) -> tuple[int, int]:
    """Blocks and warps that the table had for this size, or for its largest one."""
    same = [row for row in before if row.algorithm == algorithm]
    fits = [row for row in same if row.max_bytes >= num_bytes] or same[-1:]
    return (fits[0].num_blocks, fits[0].num_warps) if fits else (8, 16)
