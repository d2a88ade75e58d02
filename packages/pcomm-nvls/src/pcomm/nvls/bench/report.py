"""What was measured, as rows of a CSV and as tables to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pcomm.core.testing.timing import Row, Timing
from pcomm.nvls.bench.builds import Build
from pcomm.nvls.bench.host import BASELINES, DECISION
from pcomm.nvls.bench.limits import LINK_RATES, least_us
from pcomm.nvls.bench.ranks import RankTime

__all__ = ["build_rows", "host_rows", "lines_of", "rank_rows"]


def host_rows(timings: Mapping[str, Timing]) -> list[Row]:
    """A row for each call with the ratio to torch.distributed's, and one for a decision."""
    rows = []
    for ours, theirs in BASELINES.items():
        mine, bare = timings[ours], timings[theirs]
        number = len(mine.rounds_us)
        rows.append(Row("nvls host", theirs, round(bare.median_us, 2), "us", "", None, number))
        ratio = round(mine.ratio_to(bare), 3)
        rows.append(Row("nvls host", ours, round(mine.median_us, 2), "us", theirs, ratio, number))
    decision = timings[DECISION]
    value, number = round(decision.median_us, 3), len(decision.rounds_us)
    return [*rows, Row("nvls host", DECISION, value, "us", "", None, number)]


def build_rows(found: Sequence[Build]) -> list[Row]:
    """Seconds, registers, spilled bytes and blocks of each kernel, as a grid."""
    rows = []
    for build in found:
        place = f"{build.operation}, {build.algorithm}, sm_{build.architecture}"
        values = {
            "compile time": (round(build.seconds, 2), "s"),
            "registers": (build.registers, "of a thread"),
            "spilled": (build.spilled_bytes, "of a thread"),
            "blocks": (build.num_blocks, "of a launch"),
            "warps": (build.num_warps, "of a launch"),
        }
        for case, (value, unit) in values.items():
            rows.append(Row("nvls compile", f"{case} @ {place}", value, unit, "", None, 1))
    return rows


def rank_rows(times: Sequence[RankTime], architecture: str) -> list[Row]:
    """Time, bandwidth and the ratio to torch.distributed and to the least time, for each size."""
    rows = []
    latencies = [time.microseconds for time in times if time.operation == "barrier"]
    theirs = {
        (time.operation, time.num_bytes): time.microseconds
        for time in times
        if time.algorithm == "torch.distributed"
    }
    for time in times:
        place = f"{time.operation}, {time.num_bytes} bytes, {time.world} ranks"
        case, baseline = f"{time.algorithm} @ {place}", f"torch.distributed @ {place}"
        ratio = None
        if time.algorithm != "torch.distributed" and (time.operation, time.num_bytes) in theirs:
            ratio = round(time.microseconds / theirs[time.operation, time.num_bytes], 3)
        value = round(time.microseconds, 2)
        compared = "" if ratio is None else baseline
        rows.append(Row("nvls ranks", case, value, "us", compared, ratio, 1))
        if time.operation == "barrier":
            continue
        rate = time.num_bytes / time.microseconds / 1e3
        rows.append(Row("nvls ranks", case, round(rate, 2), "GB/s", "", None, 1))
        if latencies and architecture in LINK_RATES:
            least = least_us(
                time.operation,
                time.algorithm,
                time.num_bytes,
                time.world,
                rate=LINK_RATES[architecture],
                latency_us=min(latencies),
            )
            value = round(least / time.microseconds, 3)
            rows.append(Row("nvls ranks", case, value, "of the limit", "", None, 1))
    return rows


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """The rows for a reader."""
    for row in rows:
        ratio = "" if row.ratio is None else f"  {row.ratio:.3f} x {row.ratio_to}"
        yield f"{row.case:<72} {row.value:>9.3f} {row.unit}{ratio}"
