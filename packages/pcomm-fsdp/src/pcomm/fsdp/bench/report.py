"""What was measured, as rows of a CSV and as tables to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcomm.core.testing.timing import Row
from pcomm.fsdp.bench.measure import Found
from pcomm.fsdp.bench.settings import (
    FSDP2,
    FSDP2_TUNED,
    FSDP2_TWO_RAILS,
    NO_PREFETCH,
    ONE,
    TWO,
    TWO_RAILS,
    UNSHARDED,
    Settings,
)

__all__ = ["rows_of", "tables_of"]

NAME = "fsdp"
# Each of ours, and what it is compared with.
_COMPARED = (
    (ONE, FSDP2),
    (ONE, FSDP2_TUNED),
    (NO_PREFETCH, FSDP2),
    (TWO, FSDP2),
    (TWO, FSDP2_TUNED),
    (TWO_RAILS, FSDP2),
    (TWO_RAILS, FSDP2_TUNED),
    (TWO_RAILS, FSDP2_TWO_RAILS),
    (TWO_RAILS, ONE),
)
# One rail, whose bound is that of one link, and two.
_ON_TWO_RAILS = (FSDP2_TWO_RAILS, TWO_RAILS)
_MEBI = 1 << 20


def rows_of(found: Sequence[Found]) -> list[Row]:
    """Times, speed against the others and the bounds, bytes and memory of every case.

    Predictions come last; their units say so.
    """
    return [*_measured(found), *_predicted(found)]


def _measured(found: Sequence[Found]) -> list[Row]:
    rows = []
    for one in found:
        place = _place(one)
        rows += _times(one, place)
        if one.num_ranks == 1:
            rows += _alone(one, place)
        else:
            rows += _speed(one, place) + _bounds(one, place) + _bytes(one, place)
    return rows


def tables_of(settings: Settings, found: Sequence[Found]) -> str:
    """The same for a reader."""
    lines = [
        "Forward and backward, fp32, one thread a rank, gloo with one worker thread a group; "
        f"links of {settings.mbit_per_s:g} Mbit/s each way.",
        f"`{FSDP2}`: torch's fully_shard as shipped. `{FSDP2_TUNED}`: gathers ahead by explicit "
        "lists, the last unit kept,",
        f"our reduce-scatter. `{FSDP2_TWO_RAILS}`: that one sends over the second rail. All others "
        "without a number use one rail.",
        f"`{NO_PREFETCH}` gathers a unit when it is needed, the others of ours one ahead.",
    ]
    lines += _tables(_measured(found))
    if rows := _predicted(found):
        lines += [
            "",
            "PREDICTION of a model, not measured: the schedules in virtual time. Computing is what "
            "units take in steps of",
            f"`{ONE}`; a collective takes its bytes at the rate of the link, and what it takes "
            "beyond them when alone.",
            *_tables(rows),
        ]
    return "\n".join(lines)


def _tables(rows: Sequence[Row]) -> list[str]:
    lines = []
    for unit in dict.fromkeys(row.unit for row in rows):
        lines += ["", f"{unit}:", *_grid([row for row in rows if row.unit == unit])]
    return lines


def _place(found: Found) -> str:
    return f"{found.num_ranks} rank{'s' * (found.num_ranks > 1)}, {found.model}"


def _times(found: Found, place: str) -> list[Row]:
    rows = []
    for case, timing in found.timings.items():
        count = len(timing.rounds_us)
        rows.append(_row(case, place, timing.median_us / 1e3, "ms", count))
        rows.append(_row(case, place, timing.fastest_us / 1e3, "ms, fastest round", count))
    return rows


def _speed(found: Found, place: str) -> list[Row]:
    return [
        _row(
            f"{ours} over {theirs}", place, _times_as_fast(found, ours, theirs), "x as fast", count
        )
        for ours, theirs in _COMPARED
        for count in [len(found.timings[ours].rounds_us)]
    ]


def _alone(found: Found, place: str) -> list[Row]:
    count = len(found.timings[ONE].rounds_us)
    return [
        _row(f"{case} over {UNSHARDED}", place, _times_as_fast(found, case, UNSHARDED), unit, count)
        for case in (FSDP2, ONE)
        for unit in ["x as fast as unsharded"]
    ]


def _bounds(found: Found, place: str) -> list[Row]:
    rows = []
    for case, (one_link, independent) in found.bounds_s.items():
        bound_s = independent if case in _ON_TWO_RAILS else one_link
        timing = found.timings[case]
        ratio = bound_s * 1e6 / timing.median_us
        rows.append(_row(case, place, bound_s * 1e3, "ms, lower bound", 1))
        rows.append(_row(case, place, ratio, "of lower bound", len(timing.rounds_us)))
    return rows


def _bytes(found: Found, place: str) -> list[Row]:
    rows = []
    for case, step in found.steps.items():
        count = len(found.timings[case].rounds_us)
        sent, ideal = found.sent_bytes[case], step.gather_bytes() + step.reduce_bytes()
        rows.append(_row(case, place, sent / _MEBI, "MiB sent", count))
        rows.append(_row(case, place, sent / ideal, "of its ideal bytes", count))
        rows.append(_row(case, place, step.num_backward_gathers, "units gathered in backward", 1))
    for case, peak in found.peak_bytes.items():
        rows.append(_row(case, place, peak / _MEBI, "MiB at peak", 1))
    return rows


def _predicted(found: Sequence[Found]) -> list[Row]:
    rows = []
    for one in found:
        if one.prediction is None:
            continue
        place, count = _place(one), len(one.timings[ONE].rounds_us)
        for case, step_s in one.prediction.steps_s.items():
            ratio = step_s * 1e6 / one.timings[case].median_us
            rows.append(_row(case, place, step_s * 1e3, "ms, predicted", count))
            rows.append(_row(case, place, ratio, "predicted / measured", count))
        for what, seconds in (
            ("computing of the slowest rank", one.prediction.computing_s),
            ("a collective beyond its bytes", one.prediction.latency_s),
        ):
            rows.append(_row(what, place, seconds * 1e3, "ms, in the prediction", count))
    return rows


def _times_as_fast(found: Found, ours: str, theirs: str) -> float:
    return found.timings[theirs].ratio_to(found.timings[ours])


def _row(case: str, place: str, value: float, unit: str, rounds: int) -> Row:
    return Row(NAME, f"{case} @ {place}", round(value, 3), unit, "", None, rounds)


def _grid(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each case and a column for each place."""
    values = {tuple(row.case.split(" @ ")): f"{row.value:.4g}" for row in rows}
    cases = list(dict.fromkeys(case for case, _ in values))
    places = list(dict.fromkeys(place for _, place in values))
    lines = [["", *places]]
    lines += [[case, *(values.get((case, place), "-") for place in places)] for case in cases]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        yield "  " + "  ".join(cells).rstrip()
