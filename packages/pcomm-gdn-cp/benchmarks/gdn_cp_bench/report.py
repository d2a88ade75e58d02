"""What was measured, as rows of a CSV, and as tables to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core_bench.rows import Row, row
from core_bench.runner import Results, Timing
from core_bench.tables import tables, told
from gdn_cp_bench.exchange_case import SPEC
from gdn_cp_bench.forms import FORMS
from gdn_cp_bench.measure import OfPack, OfSize, PlanTime
from gdn_cp_bench.settings import HIDDEN_DIM, Settings

NAME = "gdn-cp"
# What the time of each form is divided by: the loops by ours, ours by the best that was known.
_COMPARED = {"loop": "heads", "split loop": "heads"} | dict.fromkeys(FORMS[3:], "fused")


def results_of(settings: Settings, sizes: Sequence[OfSize], plans: Sequence[PlanTime]) -> Results:
    text = tables_of(settings, sizes, plans)
    return Results(rows_of(sizes, plans), text)


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
        case, taken = f"plan {plan.strategy} @ {place}", plan.timing
        rows.append(row(NAME, case, taken.median_us / 1e3, "ms of host", len(taken.rounds_us)))
    return rows


def tables_of(settings: Settings, sizes: Sequence[OfSize], plans: Sequence[PlanTime]) -> str:
    """The same for a reader, with the strategy that `auto` takes beside the fastest."""
    widths = f"{SPEC.num_key_heads} and {SPEC.num_value_heads} heads of {SPEC.key_dim}"
    text = (
        f"One layer's exchange, {settings.tokens} tokens, fp32, {widths}, hidden states of "
        f"{HIDDEN_DIM}: an eighth of Qwen3-Next. Baselines: `loop` has 7 all-to-alls for each "
        "sequence, `split loop` is the same with a better backward, `fused` is the form of "
        "Megatron-LM's pull request 4913. `docs` moves hidden states; `state` gathers halos and "
        "maps and composes these, and does not compute them; nothing computes a mixer."
    )
    lines = [told(text)]
    lines += tables(rows_of(sizes, plans))
    for of_size in sizes:
        lines += ["", *_size_lines(of_size)]
    return "\n".join(lines)


def _times(found: OfPack, place: str) -> list[Row]:
    rows = []
    for name, timing in found.timings.items():
        other = found.timings.get(_COMPARED.get(name, ""))
        beside = other and (f"{_COMPARED[name]} @ {place}", _ratio(timing, other))
        value, count = timing.median_us / 1e3, len(timing.rounds_us)
        rows.append(row(NAME, f"{name} @ {place}", value, "ms", count, beside=beside))
    return rows


def _counts(found: OfPack, place: str) -> list[Row]:
    rows = []
    fused = found.counted["fused"].sent_bytes
    for name, counted in found.counted.items():
        case, sent = f"{name} @ {place}", counted.sent_bytes
        rows.append(row(NAME, case, counted.forward + counted.backward, "collectives"))
        is_ours = _COMPARED.get(name) == "fused" and sent
        beside = (f"fused @ {place}", sent / fused) if is_ours else None
        rows.append(row(NAME, case, sent / 1e6, "MB", beside=beside))
    rows.append(row(NAME, f"docs @ {place}", found.imbalance * 100, "% above average"))
    return rows


def _ratio(ours: Timing, theirs: Timing) -> float:
    """Of what happened in the same round, as far as both had a turn."""
    both = min(len(ours.rounds_us), len(theirs.rounds_us))
    cut = [Timing(t.case, t.rounds_us[:both]) for t in (ours, theirs)]
    return cut[0].ratio_to(cut[1])


def _size_lines(found: OfSize) -> Iterable[str]:
    link = found.link
    took = f"{link.latency_us:.0f} us and {link.gb_per_s:.2f} GB/s"
    yield f"cp {found.size}; an all-to-all takes {took}"
    for pack in found.packs:
        ours = {name: pack.timings[name].median_us for name in FORMS[3:] if name in pack.timings}
        fastest = min(ours, key=lambda name: ours[name])
        yield f"  {pack.pack.label}: auto takes {pack.auto}, the fastest is {fastest}"
        for name, why in pack.left_out.items():
            yield f"    {name} is left out, {why}"
