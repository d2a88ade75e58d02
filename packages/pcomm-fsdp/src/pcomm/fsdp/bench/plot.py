"""The times as a picture: one panel for each model and number of ranks, with the lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pcomm.fsdp.bench.measure import Found
from pcomm.fsdp.bench.settings import OURS, THEIRS, TWO, TWO_RAILS, UNSHARDED

__all__ = ["plot_times"]

_COLORS = dict.fromkeys(THEIRS, "0.6") | dict.fromkeys(OURS, "tab:blue") | {UNSHARDED: "0.85"}


def plot_times(found: Sequence[Found], image: Path) -> None:
    """Milliseconds of a step, the median as a bar and all rounds as points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [one for one in found if one.num_ranks > 1]
    figure = Figure(figsize=(4.2 * len(shown) + 1, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    cases = [*THEIRS, *OURS, UNSHARDED]
    for panel, one in zip(panels, shown, strict=True):
        for place, case in enumerate(cases):
            timing = one.timings[case]
            panel.barh(place, timing.median_us / 1e3, color=_COLORS[case])
            rounds_ms = [time / 1e3 for time in timing.rounds_us]
            panel.plot(rounds_ms, [place] * len(rounds_ms), "k.", markersize=2)
        for case, style in ((TWO, "--"), (TWO_RAILS, ":")):
            bound_ms = one.bounds_s[case][0 if case == TWO else 1] * 1e3
            label = "lower bound, one rail" if case == TWO else "lower bound, two rails"
            panel.axvline(bound_ms, color="tab:red", linestyle=style, linewidth=1, label=label)
        panel.set_yticks(range(len(cases)), cases)
        panel.set_title(f"{one.model}, {one.num_ranks} ranks")
        panel.set_xlabel("ms, forward and backward")
        panel.set_xlim(0)
    panels[0].invert_yaxis()
    panels[-1].legend(loc="lower right", fontsize="x-small")
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, format="png")
