"""What was measured, as rows of a CSV, as tables to read, and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from core_bench.runner import Results, Row, Timing, draw_lines, picture, row, tables
from inference_bench.measure import BARE, WIDE, Decoding, Measured

NAME = "inference"


def results_of(measured: Measured) -> Results:
    rows = rows_of(measured)
    return Results(rows, "\n".join(tables(rows, turned=True)), partial(plot_decoding, measured))


def rows_of(measured: Measured) -> list[Row]:
    """Every time, the ratio of steps to their matrix products, and tokens a second."""
    rows = []
    for case, bare in BARE.items():
        rounds = len(measured.no_ops[case].rounds_us)
        more = _more(measured, case)
        rows.append(row(NAME, f"{case}, more than {bare}", more, "us", rounds))
    for found in measured.bookkeeping:
        rounds = len(found.step.rounds_us)
        times = {found.step.case: found.step.median_us}
        times |= {f"{found.step.case}: {phase}": us for phase, us in found.phases_us.items()}
        rows += [row(NAME, case, value, "us", rounds) for case, value in times.items()]
    for one in (*measured.streams, *measured.contexts):
        linears, rounds = f"{one.linears.case} @ {one.place}", len(one.step.rounds_us)
        rows += [
            _ms(linears, one.linears),
            _ms(f"step @ {one.place}", one.step, (linears, one.step.ratio_to(one.linears))),
            row(NAME, f"tokens @ {one.place}", one.tokens_per_s, "tokens/s", rounds),
        ]
    for products in measured.products:
        wide = products.forms[WIDE]
        for form, timing in products.forms.items():
            beside = (f"{WIDE} @ {products.place}", timing.ratio_to(wide))
            rows.append(
                _ms(f"{form} @ {products.place}", timing, None if timing is wide else beside)
            )
    # A context may be as long as the prompts of streams.
    return list({(one.case, one.unit): one for one in rows}.values())


def _ms(case: str, timing: Timing, beside: tuple[str, float] | None = None) -> Row:
    return row(NAME, case, timing.median_us / 1e3, "ms", len(timing.rounds_us), beside=beside)


def _more(measured: Measured, case: str) -> float:
    return measured.no_ops[case].more_than(measured.no_ops[BARE[case]])


def plot_decoding(measured: Measured, image: Path) -> None:
    """Two panels: ratio by the number of streams, and tokens a second by the context."""
    with picture(image, columns=2) as ((left, right),):
        ratios = _lines(measured.streams, lambda m: (m.streams, m.step.ratio_to(m.linears)))
        draw_lines(left, ratios, x="streams", y="step over its matrix products alone")
        left.set_yscale("linear")
        tokens = _lines(measured.contexts, lambda m: (m.context, m.tokens_per_s))
        draw_lines(right, tokens, x="tokens of context, one stream", y="tokens/s")


def _lines(
    found: Sequence[Decoding], point: Callable[[Decoding], tuple[float, float]]
) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        name = f"{one.shape.name}, {one.threads} thread{'s' * (one.threads > 1)}"
        lines.setdefault(name, []).append(point(one))
    return lines
