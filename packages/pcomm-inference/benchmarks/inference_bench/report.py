"""What was measured, as rows of a CSV, and as tables to read."""

from __future__ import annotations

from core_bench.rows import Row, row
from core_bench.runner import Results, Timing
from core_bench.tables import tables
from inference_bench.measure import BARE, WIDE, Measured

NAME = "inference"


def results_of(measured: Measured) -> Results:
    rows = rows_of(measured)
    return Results(rows, "\n".join(tables(rows)))


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
