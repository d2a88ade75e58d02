"""What was measured, as rows of a CSV and as tables to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcomm.core.testing.timing import Row, Timing
from pcomm.gdn_cp.bench.forms import FORMS
from pcomm.gdn_cp.bench.measure import OfPack, OfSize
from pcomm.gdn_cp.bench.plan_time import STRATEGIES, PlanTime
from pcomm.gdn_cp.bench.settings import HIDDEN_DIM, SPEC, Settings

__all__ = ["rows_of", "tables_of"]

NAME = "gdn-cp"
# What the time of each form is divided by: the loops by ours, ours by the best that was known.
_COMPARED = {"loop": "heads", "split loop": "heads"} | dict.fromkeys(FORMS[3:], "fused")


def rows_of(sizes: Sequence[OfSize], plans: Sequence[PlanTime]) -> list[Row]:
    """Times, collectives and bytes of every form; imbalance; host time of plans."""
    rows = []
    for of_size in sizes:
        for pack in of_size.packs:
            place = f"cp {of_size.size}, {pack.pack.label}"
            rows += _times(pack, place)
            if pack.pack.is_random:
                rows += _counts(pack, place)
    for plan in plans:
        place = f"cp {plan.size}, {plan.num_sequences} random sequences"
        rows.append(
            _row(
                f"plan {plan.strategy} @ {place}",
                plan.timing.median_us / 1e3,
                "ms of host",
                len(plan.timing.rounds_us),
            )
        )
    return rows


def tables_of(settings: Settings, sizes: Sequence[OfSize], plans: Sequence[PlanTime]) -> str:
    """The same for a reader, with the strategy that `auto` takes beside the fastest."""
    widths = f"{SPEC.num_key_heads} and {SPEC.num_value_heads} heads of {SPEC.key_dim}"
    lines = [
        f"One layer's exchange, {settings.num_tokens} tokens, fp32, {widths}, hidden states of "
        f"{HIDDEN_DIM}: an eighth of Qwen3-Next.",
        "Baselines: `loop` has 7 all-to-alls for each sequence, `split loop` is the same with a "
        "better backward,",
        "`fused` is the form of Megatron-LM's pull request 4913. `docs` moves hidden states; "
        "`state` gathers halos and",
        "maps and composes these, and does not compute them; nothing computes a mixer.",
    ]
    for of_size in sizes:
        lines += ["", *_size_lines(of_size)]
    if plans:
        lines += ["", "Making a plan and all its index tensors, ms of this thread:"]
        lines += _table([["cp", "sequences", *STRATEGIES], *_plan_lines(plans)])
    return "\n".join(lines)


def _times(found: OfPack, place: str) -> list[Row]:
    rows = []
    for name, timing in found.timings.items():
        other = found.timings.get(_COMPARED.get(name, ""))
        ratio_to = "" if other is None else f"{_COMPARED[name]} @ {place}"
        ratio = None if other is None else _ratio(timing, other)
        count = len(timing.rounds_us)
        rows.append(_row(f"{name} @ {place}", timing.median_us / 1e3, "ms", count, ratio_to, ratio))
    return rows


def _counts(found: OfPack, place: str) -> list[Row]:
    rows = []
    fused = found.counted["fused"].sent_bytes
    for name, counted in found.counted.items():
        case = f"{name} @ {place}"
        rows.append(_row(case, counted.forward + counted.backward, "collectives", 1))
        is_ours = _COMPARED.get(name) == "fused" and counted.sent_bytes
        ratio_to = f"fused @ {place}" if is_ours else ""
        ratio = counted.sent_bytes / fused if is_ours else None
        rows.append(_row(case, counted.sent_bytes / 1e6, "MB", 1, ratio_to, ratio))
    rows.append(_row(f"docs @ {place}", found.imbalance * 100, "% above average", 1))
    return rows


def _ratio(ours: Timing, theirs: Timing) -> float:
    """Of what happened in the same round, as far as both had a turn."""
    both = min(len(ours.rounds_us), len(theirs.rounds_us))
    cut = [Timing(t.case, t.rounds_us[:both]) for t in (ours, theirs)]
    return cut[0].ratio_to(cut[1])


def _row(
    case: str, value: float, unit: str, rounds: int, ratio_to: str = "", ratio: float | None = None
) -> Row:
    shown = None if ratio is None else round(ratio, 3)
    return Row(NAME, case, round(value, 3), unit, ratio_to, shown, rounds)


def _size_lines(found: OfSize) -> Iterable[str]:
    link = found.link
    yield (
        f"cp {found.size}; an all-to-all takes {link.latency_us:.0f} us and "
        f"{link.gb_per_s:.2f} GB/s"
    )
    yield "ms forward and backward, median of the slowest rank (how many times as fast as fused)"
    head = ["", *FORMS, "heads over loop", "auto takes", "fastest", "busiest in docs"]
    yield from _table([head, *(_time_cells(pack) for pack in found.packs)])
    yield "collectives forward+backward, and MB that the busiest rank sends both ways"
    counted = [pack for pack in found.packs if pack.pack.is_random]
    yield from _table([["", *FORMS], *(_count_cells(pack) for pack in counted)])
    for pack in found.packs:
        for name, why in pack.left_out.items():
            yield f"  {name}, {pack.pack.label}: left out, {why}"
    few = {len(timing.rounds_us) for pack in found.packs for timing in pack.timings.values()}
    yield f"  rounds: {max(few)}, of slow forms at least {min(few)}"


def _time_cells(found: OfPack) -> list[str]:
    cells = [found.pack.label]
    fused = found.timings["fused"]
    for name in FORMS:
        timing = found.timings.get(name)
        if timing is None:
            cells.append("-")
        elif name == "fused":
            cells.append(f"{timing.median_us / 1e3:.1f}")
        else:
            cells.append(f"{timing.median_us / 1e3:.1f} ({1 / _ratio(timing, fused):.2f}x)")
    ours = {name: found.timings[name].median_us for name in FORMS[3:] if name in found.timings}
    fastest = min(ours, key=lambda name: ours[name])
    loop = found.timings.get("loop")
    over = "-" if loop is None else f"{_ratio(loop, found.timings['heads']):.1f}x"
    return [*cells, over, found.auto, fastest, f"+{found.imbalance:.1%}"]


def _count_cells(found: OfPack) -> list[str]:
    cells = [found.pack.label]
    for name in FORMS:
        counted = found.counted.get(name)
        if counted is None:
            cells.append("-")
        else:
            number = f"{counted.forward}+{counted.backward}"
            cells.append(f"{number} {counted.sent_bytes / 1e6:.2f}")
    return cells


def _plan_lines(plans: Sequence[PlanTime]) -> list[list[str]]:
    by_place: dict[tuple[int, int], list[str]] = {}
    for plan in plans:
        cells = by_place.setdefault((plan.num_sequences, plan.size), [])
        cells.append(f"{plan.timing.median_us / 1e3:.2f}")
    return [[str(size), str(count), *cells] for (count, size), cells in by_place.items()]


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
