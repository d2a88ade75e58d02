"""The times as a picture: one panel for each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pcomm.gdn_cp.bench.forms import FORMS
from pcomm.gdn_cp.bench.measure import OfSize

__all__ = ["plot_times"]

# Baselines are grey and broken, so that the strategies stand out.
_BASELINES = {"loop": ("0.2", "--"), "split loop": ("0.5", ":"), "fused": ("0.2", "-")}
_MODES = {"heads": "tab:blue", "docs": "tab:green", "state": "tab:orange", "gather": "tab:red"}


def plot_times(sizes: Sequence[OfSize], image: Path) -> None:
    """Milliseconds over the number of sequences, of random lengths, both on log scales."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(sizes), 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for panel, of_size in zip(panels, sizes, strict=True):
        packs = [found for found in of_size.packs if found.pack.is_random]
        for name in FORMS:
            points = [
                (found.pack.num_sequences, found.timings[name].median_us / 1e3)
                for found in packs
                if name in found.timings
            ]
            color, style = _BASELINES.get(name, (_MODES.get(name, ""), "-"))
            xs, ys = [x for x, _ in points], [y for _, y in points]
            panel.plot(xs, ys, style, color=color, marker="o", markersize=4, label=name)
        counts = sorted({found.pack.num_sequences for found in packs})
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.minorticks_off()
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_title(f"{of_size.size} ranks")
        panel.set_xlabel("sequences in the pack")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("ms, forward and backward, one layer's exchange")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, format="png")
