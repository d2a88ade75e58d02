"""What was measured, as rows of a CSV and as tables to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pcomm.core.testing.timing import Row, Timing
from pcomm.inference.bench.measure import Decoding, Measured, Products
from pcomm.inference.bench.no_ops import BARE
from pcomm.inference.bench.weight_forms import INT8, INVARIANT, PACKED, WIDE

__all__ = ["rows_of", "tables_of"]

NAME = "inference"


def rows_of(measured: Measured) -> list[Row]:
    """Every time, the ratio of steps to their matrix products, and tokens a second."""
    rows = []
    for case, bare in BARE.items():
        timing = measured.no_ops[case]
        rows.append(_row(f"{case}, more than {bare}", _more(measured, case), "us", timing))
    for found in measured.bookkeeping:
        rows.append(_row(found.step.case, found.step.median_us, "us", found.step))
        rows += [
            _row(f"{found.step.case}: {phase}", time_us, "us", found.step)
            for phase, time_us in found.phases_us.items()
        ]
    for decoding in (*measured.streams, *measured.contexts):
        place = _place(decoding)
        ratio = round(decoding.step.ratio_to(decoding.linears), 3)
        linears = f"{decoding.linears.case} @ {place}"
        rows += [
            _row(linears, decoding.linears.median_us / 1e3, "ms", decoding.linears),
            _row(
                f"step @ {place}",
                decoding.step.median_us / 1e3,
                "ms",
                decoding.step,
                linears,
                ratio,
            ),
            _row(f"tokens @ {place}", decoding.tokens_per_s, "tokens/s", decoding.step),
        ]
    for products in measured.products:
        wide = products.forms[WIDE]
        place = f"{products.shape.name}, threads {products.threads}, rows {products.rows}"
        for form, timing in products.forms.items():
            beside = (
                () if timing is wide else (f"{WIDE} @ {place}", round(timing.ratio_to(wide), 3))
            )
            rows.append(_row(f"{form} @ {place}", timing.median_us / 1e3, "ms", timing, *beside))
    # A context may be as long as the prompts of streams.
    return list({(row.case, row.unit): row for row in rows}.values())


def tables_of(measured: Measured) -> str:
    """The same for a reader."""
    lines = ["Microseconds that a call costs on one rank, one thread:"]
    for case, bare in BARE.items():
        lines.append(f"  {_more(measured, case):8.2f}  {case}, more than {bare}")
    lines += ["", "Microseconds of a step of decoding without a model, by phase:"]
    for found in measured.bookkeeping:
        phases = ", ".join(f"{name} {time_us:.0f}" for name, time_us in found.phases_us.items())
        lines.append(f"  {found.rows:3d} rows  {found.step.median_us:8.1f}  ({phases})")
    lines += ["", "Steps of decoding in bf16, beside their matrix products alone:"]
    lines += _decoding_lines((*measured.streams, *measured.contexts))
    lines += ["", "Matrix products alone by the form of the weights, in milliseconds:"]
    lines += _product_lines(measured.products)
    return "\n".join(lines)


def _product_lines(found: Sequence[Products]) -> Iterator[str]:
    yield "  F.linear   packed     int8  invariant"
    for one in found:
        times = "  ".join(
            f"{one.forms[form].median_us / 1e3:7.2f}" for form in (WIDE, PACKED, INT8, INVARIANT)
        )
        yield f"   {times}  {one.shape.name}, threads {one.threads}, rows {one.rows}"


def _decoding_lines(found: Sequence[Decoding]) -> Iterator[str]:
    yield "  step ms  linears ms  ratio  tokens/s"
    for one in found:
        ratio = one.step.ratio_to(one.linears)
        yield (
            f"  {one.step.median_us / 1e3:7.2f}  {one.linears.median_us / 1e3:10.2f}  {ratio:5.2f}"
            f"  {one.tokens_per_s:8.1f}  {_place(one)}"
        )


def _more(measured: Measured, case: str) -> float:
    timing, bare = measured.no_ops[case], measured.no_ops[BARE[case]]
    return timing.more_than(bare)


def _place(found: Decoding) -> str:
    return (
        f"{found.shape.name}, threads {found.threads}, streams {found.streams}, "
        f"context {found.context}"
    )


def _row(
    case: str,
    value: float,
    unit: str,
    timing: Timing,
    ratio_to: str = "",
    ratio: float | None = None,
) -> Row:
    return Row(NAME, case, round(value, 3), unit, ratio_to, ratio, len(timing.rounds_us))
