"""The memory monitor's picture: one step as stacked areas over its units, and what every stage would need."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_zero.callbacks.measurements import ACTIVATIONS, BUFFERS, OTHER
from lightning_zero.callbacks.step_trace import GATHERING, IDLE, REDUCING, UNSHARDED, StepTrace
from lightning_zero.formulas import HOST_KINDS, MemoryEstimate
from lightning_zero.tables import ByteUnit

# Of Okabe and Ito's palette, which people who see fewer colours can tell apart.
_COLORS = {
    "optimizer": "#0072B2",
    "master": "#56B4E9",
    "parameters": "#009E73",
    "gradients": "#E69F00",
    BUFFERS: "#D55E00",
    IDLE: "#F3C9AE",
    ACTIVATIONS: "#CC79A7",
    "staging": "#F0E442",
    "undo": "#B8B03A",
    "delayed_gradients": "#F5CE86",
    "file_buffers": "#8C7CC0",
    OTHER: "#999999",
}
_LABELS = {"optimizer": "optimizer state", "master": "master weights", BUFFERS: "buffers in use", IDLE: "idle buffers", "delayed_gradients": "delayed gradients", "file_buffers": "file buffers"}
_SPANS = {
    UNSHARDED: ("#009E73", "unsharded"),
    GATHERING: ("#B5E3D3", "being gathered"),
    REDUCING: ("#E69F00", "gradients being reduced"),
}
_STACK = ("optimizer", "master", "parameters", "gradients", *HOST_KINDS, BUFFERS, IDLE, ACTIVATIONS, OTHER)
_MOST_LANES = 32
_LONGEST_NAME = 28


def check_plot(argument: str, path: str) -> None:
    """Raise unless a picture can be drawn and written to ``path``, the value of ``argument``."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{argument} must name a .png file, got {path!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"{argument} needs matplotlib to draw {path!r}: pip install 'lightning_zero[plot]', or leave it out."
        )
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"{argument} must name a .png file, got {path!r}")


def draw(
    path: str, title: str, trace: StepTrace, by_stage: Sequence[MemoryEstimate], ran: int, peak: float,
    on_host: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the picture to ``path``, whose folder is made if there is none.

    ``by_stage`` are predictions, ``ran`` is the stage that was trained with, and ``peak`` are the bytes it has taken.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it has state, and would want a display

    lanes = lanes_of(trace)
    figure = Figure(figsize=(13, 5.2 + 0.19 * len(lanes)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [4.2, max(0.6, 0.19 * len(lanes) + 0.4)]
    grid = figure.add_gridspec(2, 2, width_ratios=[2.6, 1], height_ratios=heights)
    areas = figure.add_subplot(grid[0, 0])
    spans = figure.add_subplot(grid[1, 0], sharex=areas)
    bars = figure.add_subplot(grid[0, 1])
    figure.suptitle(title, fontsize=12)
    names = {kind: _LABELS.get(kind, kind) + (" (host)" if kind in (*on_host, *HOST_KINDS) else "") for kind in _STACK}
    _draw_areas(areas, trace, names)
    draw_lanes(spans, trace, lanes)
    _draw_bars(bars, by_stage, ran, peak, names)
    handles = {}
    for axes in (areas, bars):
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.add_subplot(grid[1, 1], frameon=False, xticks=[], yticks=[]).legend(
        handles.values(), handles.keys(), loc="upper left", frameon=False, fontsize=9
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_areas(axes: Any, trace: StepTrace, names: Mapping[str, str]) -> None:
    # A sample holds until the next one: each is drawn at both ends of its time.
    ends = [sample.seconds for sample in trace.samples[1:]] + [trace.seconds]
    times = [1000 * t for sample, end in zip(trace.samples, ends, strict=True) for t in (sample.seconds, end)]
    unit = ByteUnit.for_bytes(max(sum(sample.held.values()) for sample in trace.samples))
    kinds = [kind for kind in _STACK if any(sample.held[kind] for sample in trace.samples)]
    rows = [[unit.scale(s.held[kind]) for s in trace.samples for _ in range(2)] for kind in kinds]
    axes.stackplot(
        times, rows, colors=[_COLORS[kind] for kind in kinds], labels=[names[kind] for kind in kinds], linewidth=0
    )
    axes.set_ylabel(f"{unit.name} on this rank")
    axes.set_xlim(0, 1000 * trace.seconds)
    axes.set_ylim(0, 1.12 * max(map(sum, zip(*rows, strict=True))))
    axes.tick_params(labelbottom=False)
    ends = [seconds for seconds, _ in trace.marks[1:]] + [trace.seconds]
    for (start, phase), end in zip(trace.marks, ends, strict=True):
        axes.axvline(1000 * start, color="black", linewidth=0.6, alpha=0.5)
        if end - start > 0.05 * trace.seconds:
            axes.text(
                500 * (start + end), 0.99, phase, ha="center", va="top", fontsize=9, transform=axes.get_xaxis_transform()
            )


def lanes_of(trace: StepTrace) -> list[int]:
    """The units that get a lane of their own: those that do most, in the model's order."""
    busy = dict.fromkeys(range(len(trace.units)), 0.0)
    for span in trace.spans:
        busy[span.unit] += span.stop - span.start
    chosen = sorted(busy, key=lambda index: busy[index], reverse=True)[:_MOST_LANES]
    return sorted(chosen)


def draw_lanes(axes: Any, trace: StepTrace, lanes: Sequence[int]) -> None:
    row = {unit: position for position, unit in enumerate(lanes)}
    for what, (color, label) in _SPANS.items():
        found = [span for span in trace.spans if span.what == what and span.unit in row]
        if found:
            # Gradients below, parameters above: a unit can be busy with both.
            shift = 0.2 if what == REDUCING else -0.2
            axes.barh(
                [row[span.unit] + shift for span in found],
                [1000 * (span.stop - span.start) for span in found],
                left=[1000 * span.start for span in found], height=0.4, color=color, label=label,
            )  # fmt: skip
    for start, _ in trace.marks:
        axes.axvline(1000 * start, color="black", linewidth=0.6, alpha=0.5)
    axes.set_yticks(range(len(lanes)), [_short(trace.units[unit]) for unit in lanes], fontsize=7)
    axes.set_ylim(len(lanes) - 0.4, -0.7)
    axes.set_xlabel("ms from the start of the step")
    left_out = len(trace.units) - len(lanes)
    axes.set_title(
        "units" + (f" (the busiest {len(lanes)} of {len(trace.units)})" if left_out else ""), fontsize=9, loc="left"
    )
    if any(span.unit in row for span in trace.spans):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_SPANS), frameon=False, fontsize=8)


def _draw_bars(axes: Any, by_stage: Sequence[MemoryEstimate], ran: int, peak: float, names: Mapping[str, str]) -> None:
    """What every stage is predicted to take, and a line across the one that ran for what it took."""
    unit = ByteUnit.for_bytes(max(peak, *(estimate.total + estimate.buffers + estimate.beside for estimate in by_stage)))
    tops = [0.0] * len(by_stage)
    for kind in _STACK:
        values = [unit.scale(getattr(estimate, kind, 0)) for estimate in by_stage]
        if any(values):
            axes.bar(range(len(by_stage)), values, bottom=tops, color=_COLORS[kind], label=names[kind], width=0.65)
            tops = [a + b for a, b in zip(tops, values, strict=True)]
    position = next(i for i, estimate in enumerate(by_stage) if estimate.stage == ran)
    height = unit.scale(peak)
    label = f"measured peak ({height:.3g})"
    axes.plot([position - 0.45, position + 0.45], [height, height], color="black", linewidth=1.6, label=label)
    for i, top in enumerate(tops):
        # Above the bar, and above the line across it where that would go through the number.
        crossed = i == position and 0 <= height - top < 0.06 * max(tops)
        axes.text(i, height if crossed else top, f"{top:.3g}", ha="center", va="bottom", fontsize=9)
    ticks = ["plain DP" if not estimate.stage else f"stage {estimate.stage}" for estimate in by_stage]
    axes.set_xticks(range(len(by_stage)), ticks)
    axes.set_ylim(top=1.1 * max(*tops, height))
    axes.set_ylabel(f"{unit.name} on each rank, predicted")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME:]}"
