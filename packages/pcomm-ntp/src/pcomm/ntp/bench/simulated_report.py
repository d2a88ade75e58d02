"""Predictions as rows, as lines, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pcomm.core.testing.timing import Row
from pcomm.ntp.bench.simulated import GOAL, Prediction

__all__ = ["curves", "draw", "reached", "rows_of_predictions", "summary_lines"]

_EVEN, _HEADS = "predicted, even work", "predicted, 128 heads"
_DRAWN = ("drop", "drop packed", "drop packed, spares", "paper", "exact in place", "exact sorted")


def rows_of_predictions(found: Sequence[Prediction]) -> list[Row]:
    """A row for each prediction; those of schemes with a goal say how many places reach it."""
    rows = [
        Row(
            one.kind,
            f"{one.scheme} @ {one.fleet}, {one.condition}",
            one.value,
            one.unit,
            "",
            None,
            one.placements,
            hardware="none: these are predictions",
            cores=0,
        )
        for one in found
    ]
    for kind in (_EVEN, _HEADS):
        for scheme, (number, count, least) in reached(found, kind).items():
            for unit, value in {
                f"of {count} places at {GOAL} or above": float(number),
                "of the ideal in the worst place": least,
            }.items():
                rows.append(
                    Row(
                        "predicted, summary",
                        f"{scheme} @ {kind.removeprefix('predicted, ')}",
                        value,
                        unit,
                        "",
                        None,
                        found[0].placements,
                        hardware="none: these are predictions",
                        cores=0,
                    )
                )
    return rows


def reached(found: Sequence[Prediction], kind: str) -> dict[str, tuple[int, int, float]]:
    """By scheme: how many places reach the goal, of how many, and the worst ratio.

    Args:
        found: Predictions.
        kind: Table that is counted.
    """
    values: dict[str, list[float]] = {}
    for one in found:
        if one.kind == kind:
            values.setdefault(one.scheme, []).append(one.value)
    return {
        scheme: (sum(value >= GOAL for value in all_of), len(all_of), min(all_of))
        for scheme, all_of in values.items()
    }


def curves(
    found: Sequence[Prediction], kind: str, tp: int
) -> dict[str, tuple[list[float], list[float]]]:
    """By scheme: failed percent and the ratio to the ideal, of the largest job of a degree.

    Args:
        found: Predictions.
        kind: Table that is drawn.
        tp: Tensor-parallel degree.
    """
    chosen = [one for one in found if one.kind == kind and one.fleet.tp == tp]
    largest = max((one.fleet.num_gpus for one in chosen), default=0)
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for one in chosen:
        if one.fleet.num_gpus == largest:
            percents, ratios = lines.setdefault(one.scheme, ([], []))
            percents.append(float(one.condition.split("%")[0]))
            ratios.append(one.value)
    return lines


def draw(path: Path, found: Sequence[Prediction]) -> None:
    """Draw the ratio to the ideal against the failed share, for each degree, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    degrees = sorted({one.fleet.tp for one in found if one.kind == _EVEN})
    figure, axes = pyplot.subplots(
        2, len(degrees), figsize=(3.2 * len(degrees), 6.4), sharex=True, sharey=True, squeeze=False
    )
    for line, kind in zip(axes, (_EVEN, _HEADS), strict=True):
        for axis, tp in zip(line, degrees, strict=True):
            lines = curves(found, kind, tp)
            for scheme in _DRAWN:
                if scheme in lines:
                    axis.plot(*lines[scheme], marker="o", markersize=3, label=scheme)
            axis.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":")
            axis.set_title(f"TP{tp}, {kind.removeprefix('predicted, ')}", fontsize=9)
            axis.set_ylim(0.7, 1.01)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("failed GPUs in %")
    for line in axes:
        line[0].set_ylabel("throughput over the ideal")
    axes[0][0].legend(fontsize=7, loc="lower left")
    figure.suptitle("Predicted, not measured: the largest job of each degree")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def summary_lines(found: Sequence[Prediction]) -> Iterator[str]:
    """For a reader: which schemes reach the goal where."""
    for kind in (_EVEN, _HEADS):
        for scheme, (number, count, least) in reached(found, kind).items():
            yield f"{kind}: {scheme:<20} {number:>3} of {count} at {GOAL}, worst {least:.4f}"
