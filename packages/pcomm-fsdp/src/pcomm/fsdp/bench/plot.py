"""The times as a picture: a panel for each model, number of ranks and link, with lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pcomm.fsdp.bench.forms import FORMS, OURS, THEIRS, TWO, TWO_RAILS, UNSHARDED
from pcomm.fsdp.bench.measure import Found

__all__ = ["plot_times"]

_COLORS = dict.fromkeys(THEIRS, "0.6") | dict.fromkeys(OURS, "tab:blue") | {UNSHARDED: "0.85"}


def plot_times(found: Sequence[Found], image: Path) -> None:
    """Milliseconds of a step, the median as a bar and all rounds as points; a line a link."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [one for one in found if one.num_ranks > 1]
    links = list(dict.fromkeys(one.link for one in shown))
    lines = [[one for one in shown if one.link == link] for link in links]
    most = max(map(len, lines))
    names = (*(form.name for form in FORMS), UNSHARDED)
    cases = [case for case in names if case in shown[0].timings]
    figure = Figure(figsize=(4 * most + 2, 4.2 * len(lines)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(lines), most, sharey=True, squeeze=False)
    for panels, line in zip(grid, lines, strict=True):
        for panel in panels[len(line) :]:
            panel.set_visible(False)
        for panel, one in zip(panels, line, strict=False):
            for place, case in enumerate(cases):
                timing = one.timings[case]
                panel.barh(place, timing.median_us / 1e3, color=_COLORS[case])
                rounds_ms = [time / 1e3 for time in timing.rounds_us]
                panel.plot(rounds_ms, [place] * len(rounds_ms), "k.", markersize=2)
            for case, style in ((TWO, "--"), (TWO_RAILS, ":")):
                if case in one.bounds_s:
                    bound_ms = one.bounds_s[case][0 if case == TWO else 1] * 1e3
                    rails = "one rail" if case == TWO else "two rails"
                    label = f"pcomm's lower bound, {rails}"
                    panel.axvline(bound_ms, color="tab:red", linestyle=style, lw=1, label=label)
            panel.set_yticks(range(len(cases)), cases)
            name = one.link.name or f"{one.link.mbit_per_s:g} Mbit/s"
            panel.set_title(f"{one.model}, {one.num_ranks} ranks, {name}", fontsize="small")
            panel.set_xlabel("ms, forward and backward")
            panel.set_xlim(0)
    grid[0][0].invert_yaxis()
    if grid[0][0].get_legend_handles_labels()[0]:
        grid[0][0].legend(loc="lower right", fontsize="x-small")
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, format="png")
