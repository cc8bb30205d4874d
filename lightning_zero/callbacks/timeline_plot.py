"""The picture of a step's time: what one rank's thread did, and what its units did meanwhile."""

from typing import Any

from lightning_zero.callbacks.memory_plot import draw_lanes, lanes_of
from lightning_zero.callbacks.timeline import ENGINE, HOST, OTHER_WAITS, WAITS, Timeline

# Of Okabe and Ito's palette, as in memory_plot.
_COLORS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "update": "#CC79A7",
    WAITS["all_gather"]: "#D55E00",
    WAITS["reduce_scatter"]: "#E69F00",
    OTHER_WAITS: "#F0E442",
    ENGINE: "#009E73",
    HOST: "#BBBBBB",
}


def draw(path: str, title: str, timeline: Timeline) -> None:
    """Write the picture to ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it has state, and would want a display

    trace, shares = timeline.trace, timeline.shares()
    lanes = lanes_of(trace)
    figure = Figure(figsize=(13, 3.6 + 0.19 * len(lanes)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 1, height_ratios=[1.2, 1.2, max(0.6, 0.19 * len(lanes) + 0.4)])
    figure.suptitle(title, fontsize=12)
    _draw_shares(figure.add_subplot(grid[0]), shares, trace.seconds)
    strip = figure.add_subplot(grid[1])
    for kind, color in _COLORS.items():
        found = [(1000 * p.start, 1000 * (p.stop - p.start)) for p in timeline.pieces if p.kind == kind]
        strip.broken_barh(found, (0, 1), color=color, linewidth=0)
    strip.set_yticks([0.5], ["this rank"], fontsize=7)
    strip.set_ylim(0, 1)
    strip.tick_params(labelbottom=False)
    ends = [seconds for seconds, _ in trace.marks[1:]] + [trace.seconds]
    for (start, phase), end in zip(trace.marks, ends, strict=True):
        strip.axvline(1000 * start, color="black", linewidth=0.6, alpha=0.5)
        if end - start > 0.05 * trace.seconds:
            strip.text(500 * (start + end), 1.04, phase, ha="center", va="bottom", fontsize=9)
    below = figure.add_subplot(grid[2], sharex=strip)
    draw_lanes(below, trace, lanes)
    strip.set_xlim(0, 1000 * trace.seconds)
    figure.savefig(path)


def _draw_shares(axes: Any, shares: dict[str, float], seconds: float) -> None:
    """One bar of all kinds, in the colours of the strip below it."""
    left = 0.0
    for kind in (kind for kind in _COLORS if kind in shares):
        part = 100 * shares[kind] / seconds
        axes.barh([0], [part], left=left, color=_COLORS[kind], label=f"{kind} {part:.0f}%")
        left += part
    axes.set_xlim(0, 100)
    axes.set_yticks([0], ["share"], fontsize=7)
    axes.tick_params(labelsize=8)
    axes.set_xlabel(f"% of {1000 * seconds:.0f} ms", fontsize=8, labelpad=1)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False, fontsize=8)
