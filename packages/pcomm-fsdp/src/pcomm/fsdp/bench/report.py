"""Measurements as rows of a CSV and as tables to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcomm.core.testing.timing import Row
from pcomm.fsdp.bench.forms import (
    CHANGES,
    COMPARED,
    FSDP2,
    NO_PAIRS,
    NO_PREFETCH,
    ONE,
    TUNED,
    TUNED_TWO_RAILS,
    TWO_RAILS,
    UNSHARDED,
)
from pcomm.fsdp.bench.measure import Found
from pcomm.fsdp.bench.settings import Settings, place_of

__all__ = ["rows_of", "tables_of"]

NAME = "fsdp"
# One rail, whose bound is that of one link, and two.
_ON_TWO_RAILS = (TUNED_TWO_RAILS, TWO_RAILS)
_MEBI = 1 << 20


def rows_of(found: Sequence[Found]) -> list[Row]:
    """Times, speed against the others and the bounds, bytes and memory of every case.

    Predictions come last; their units say so.
    """
    return [*_measured(found), *_predicted(found)]


def _measured(found: Sequence[Found]) -> list[Row]:
    rows = []
    for one in found:
        place = place_of(one.num_ranks, one.model, one.link)
        rows += _times(one, place)
        if one.num_ranks == 1:
            rows += _alone(one, place)
        else:
            rows += _speed(one, place) + _changes(one, place) + _bounds(one, place)
            rows += _bytes(one, place)
    return rows


def tables_of(settings: Settings, found: Sequence[Found]) -> str:
    """The same for a reader."""
    rates = " and ".join(f"{link.mbit_per_s:g}" for link in settings.links)
    lines = [
        "Forward and backward, fp32, one thread a rank, gloo with one worker thread a group; "
        f"links of {rates} Mbit/s each way.",
        f"`{FSDP2}`: torch's fully_shard as shipped. Each line after it adds one thing, up to "
        f"`{TUNED}`: our",
        "reduce-scatter and all-gather, gathers ahead by explicit lists, each reduce waited for "
        "after the next is issued,",
        "the last two units kept. `2 groups` reduces on a communicator of its own, `2 rails` on "
        "one of the second rail.",
        f"`{NO_PREFETCH}` gathers a unit when it is needed, the others of ours one ahead; "
        f"`{NO_PAIRS}`",
        "has gloo's all-gather and all-to-all. Gradients were those of one process in every step.",
    ]
    lines += _tables(_measured(found))
    if rows := _predicted(found):
        lines += [
            "",
            "PREDICTION of a model, not measured: the schedules in virtual time. Computing is what "
            "units take in steps of",
            "the first of ours; a collective takes its bytes at the rate of the link, and what it "
            "takes beyond them when alone.",
            *_tables(rows),
        ]
    return "\n".join(lines)


def _tables(rows: Sequence[Row]) -> list[str]:
    lines = []
    for unit in dict.fromkeys(row.unit for row in rows):
        lines += ["", f"{unit}:", *_grid([row for row in rows if row.unit == unit])]
    return lines


def _times(found: Found, place: str) -> list[Row]:
    rows = []
    for case, timing in found.timings.items():
        count = len(timing.rounds_us)
        rows.append(_row(case, place, timing.median_us / 1e3, "ms", count))
        rows.append(_row(case, place, timing.fastest_us / 1e3, "ms, fastest round", count))
    return rows


def _speed(found: Found, place: str) -> list[Row]:
    return [
        row
        for ours, theirs in COMPARED
        for row in _ratio(f"{ours} over {theirs}", found, place, ours, theirs, "x as fast")
    ]


def _changes(found: Found, place: str) -> list[Row]:
    """The worth of each thing that one form has and another one has not."""
    return [
        row
        for change in CHANGES
        for row in _ratio(
            change.name, found, place, change.after, change.before, "x as fast, by one change"
        )
    ]


def _alone(found: Found, place: str) -> list[Row]:
    return [
        row
        for case in (FSDP2, ONE)
        for row in _ratio(
            f"{case} over {UNSHARDED}", found, place, case, UNSHARDED, "x as fast as unsharded"
        )
    ]


def _ratio(name: str, found: Found, place: str, after: str, before: str, unit: str) -> list[Row]:
    """The speed of one form over that of another, if both were measured."""
    if after not in found.timings or before not in found.timings:
        return []
    timing = found.timings[after]
    value = found.timings[before].ratio_to(timing)
    return [_row(name, place, value, unit, len(timing.rounds_us))]


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
        ideal = step.gather_bytes() + step.reduce_bytes()
        sent = found.sent_bytes[case]
        rows.append(_row(case, place, sent / _MEBI, "MiB sent", count))
        rows.append(_row(case, place, sent / ideal, "of its ideal bytes", count))
        rows.append(_row(case, place, step.num_backward_gathers, "units gathered in backward", 1))
    if found.steps:
        # On one link, for those that send most; above 1 all but the ends could be hidden.
        most = max(found.steps.values(), key=lambda step: step.gather_bytes())
        sending_s = (most.gather_bytes() + most.reduce_bytes()) / found.link.bytes_per_s
        ratio = (most.forward_s + most.backward_s) / sending_s
        rows.append(_row("computing / sending", place, ratio, "where 1 hides all", 1))
    for case, peak in found.peak_bytes.items():
        rows.append(_row(case, place, peak / _MEBI, "MiB at peak", 1))
    return rows


def _predicted(found: Sequence[Found]) -> list[Row]:
    rows = []
    for one in found:
        if one.prediction is None:
            continue
        place = place_of(one.num_ranks, one.model, one.link)
        count = min(len(timing.rounds_us) for timing in one.timings.values())
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
