"""Measurements as rows of a CSV, and as tables to read."""

from __future__ import annotations

from collections.abc import Sequence

from core_bench.rows import Row, row
from core_bench.runner import Results
from core_bench.tables import tables, told
from fsdp_bench.measure import FsdpResult
from fsdp_bench.settings import (
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
    Settings,
    place_of,
)

NAME = "fsdp"
# One rail, whose bound is that of one link, and two.
_ON_TWO_RAILS = (TUNED_TWO_RAILS, TWO_RAILS)
_MEBI = 1 << 20


def results_of(settings: Settings, found: Sequence[FsdpResult]) -> Results:
    return Results(rows_of(found), tables_of(settings, found))


def rows_of(found: Sequence[FsdpResult]) -> list[Row]:
    """Times, speed against the others and the bounds, bytes and memory of every case.

    Predictions come last; their units say so.
    """
    return [*_measured(found), *_predicted(found)]


def _measured(found: Sequence[FsdpResult]) -> list[Row]:
    rows = []
    for one in found:
        place = place_of(one.num_ranks, one.model, one.link)
        rows += _times(one, place)
        if one.num_ranks == 1:
            for case in (FSDP2, ONE):
                name = f"{case} over {UNSHARDED}"
                rows += _ratio(name, one, place, case, UNSHARDED, "x as fast as unsharded")
        else:
            for ours, theirs in COMPARED:
                rows += _ratio(f"{ours} over {theirs}", one, place, ours, theirs, "x as fast")
            for change in CHANGES:
                both = change.after, change.before
                rows += _ratio(change.name, one, place, *both, "x as fast, by one change")
            rows += _bounds(one, place) + _bytes(one, place)
    return rows


def tables_of(settings: Settings, found: Sequence[FsdpResult]) -> str:
    """The same for a reader."""
    rates = " and ".join(f"{link.mbit_per_s:g}" for link in settings.links)
    text = (
        "Forward and backward, fp32, one thread a rank, gloo with one worker thread a group; "
        f"links of {rates} Mbit/s each way. `{FSDP2}`: torch's fully_shard as shipped. Each line "
        f"after it adds one thing, up to `{TUNED}`: our reduce-scatter and all-gather, gathers "
        "ahead by explicit lists, each reduce waited for after the next is issued, the last two "
        "units kept. `2 groups` reduces on a communicator of its own, `2 rails` on one of the "
        f"second rail. `{NO_PREFETCH}` gathers a unit when it is needed, the others of ours one "
        f"ahead; `{NO_PAIRS}` has gloo's all-gather and all-to-all. Gradients were those of one "
        "process in every step."
    )
    lines = [told(text)]
    lines += tables(_measured(found))
    if rows := _predicted(found):
        lines += [
            "",
            "PREDICTION of a model, not measured: the schedules in virtual time. Computing is what "
            "units take in steps of",
            "the first of ours; a collective takes its bytes at the rate of the link, and what it "
            "takes beyond them when alone.",
            *tables(rows),
        ]
    return "\n".join(lines)


def _times(found: FsdpResult, place: str) -> list[Row]:
    rows = []
    for case, timing in found.timings.items():
        count = len(timing.rounds_us)
        rows.append(_row(case, place, timing.median_us / 1e3, "ms", count))
        rows.append(_row(case, place, timing.fastest_us / 1e3, "ms, fastest round", count))
    return rows


def _ratio(
    name: str, found: FsdpResult, place: str, after: str, before: str, unit: str
) -> list[Row]:
    """The speed of one form over that of another, if both were measured."""
    if after not in found.timings or before not in found.timings:
        return []
    timing = found.timings[after]
    value = found.timings[before].ratio_to(timing)
    return [_row(name, place, value, unit, len(timing.rounds_us))]


def _bounds(found: FsdpResult, place: str) -> list[Row]:
    rows = []
    for case, (one_link, independent) in found.bounds_s.items():
        bound_s = independent if case in _ON_TWO_RAILS else one_link
        timing = found.timings[case]
        ratio = bound_s * 1e6 / timing.median_us
        rows.append(_row(case, place, bound_s * 1e3, "ms, lower bound", 1))
        rows.append(_row(case, place, ratio, "of lower bound", len(timing.rounds_us)))
    return rows


def _bytes(found: FsdpResult, place: str) -> list[Row]:
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


def _predicted(found: Sequence[FsdpResult]) -> list[Row]:
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
    return row(NAME, f"{case} @ {place}", value, unit, rounds)
