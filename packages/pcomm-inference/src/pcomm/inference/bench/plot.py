"""The ratio to matrix products and the tokens a second, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pcomm.inference.bench.measure import Decoding, Measured

__all__ = ["plot_decoding"]


def plot_decoding(measured: Measured, image: Path) -> None:
    """Two panels: ratio by the number of streams, and tokens a second by the context."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw(
        left, measured.streams, lambda one: one.streams, lambda one: one.step.ratio_to(one.linears)
    )
    left.set_xlabel("streams")
    left.set_ylabel("step over its matrix products alone")
    _draw(right, measured.contexts, lambda one: one.context, lambda one: one.tokens_per_s)
    right.set_xlabel("tokens of context, one stream")
    right.set_ylabel("tokens/s")
    right.set_yscale("log")
    left.legend(frameon=False)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, format="png")


def _ratio(one: Decoding) -> float:
    return one.step.ratio_to(one.linears)


def _draw(
    panel: object,
    found: Sequence[Decoding],
    x: Callable[[Decoding], float],
    y: Callable[[Decoding], float],
) -> None:
    for shape in dict.fromkeys(one.shape for one in found):
        for threads in dict.fromkeys(one.threads for one in found):
            points = [one for one in found if (one.shape, one.threads) == (shape, threads)]
            label = f"{shape.name}, {threads} thread{'s' * (threads > 1)}"
            panel.plot(  # type: ignore[attr-defined]
                [x(one) for one in points], [y(one) for one in points], marker="o", label=label
            )
    panel.set_xscale("log", base=2)  # type: ignore[attr-defined]
    panel.grid(alpha=0.3)  # type: ignore[attr-defined]
