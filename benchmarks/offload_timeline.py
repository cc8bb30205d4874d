"""Draw one step of each mode of offload_pipeline.py: what the device, the bus and the host's threads do, and when.

    python -m benchmarks.offload_timeline --plot docs/images/offload_timeline.png

The device is simulated, the host's work is real. Needs matplotlib (pip install '.[plot]').
"""

import argparse
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib
import torch

from benchmarks import offload_pipeline as pipeline
from lightning_zero.offload.unit_update import UnitUpdate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROWS = ("device", "gradients down", "weights up", "host: step", "host: update thread")
COLORS = ("tab:gray", "tab:blue", "tab:green", "tab:red", "tab:orange")
Span = tuple[str, float, float]
MODES = ("at once", "early", "one step late")


def record(spans: list[Span], owner: Any, name: str, row: Any) -> None:
    """Note when ``owner.name`` runs; ``row`` is that of the spans, or says which from its arguments."""
    function = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spans.append((row if isinstance(row, str) else row(*args), start, time.perf_counter()))

    setattr(owner, name, recorded)


class Ends(pl.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())


def median_step(spans: list[Span], ends: list[float], mode: str) -> tuple[float, float]:
    """Begin and end of the step of median length; of early ones, of those with updates on the other thread: it is also tried
    without them."""
    steps = list(itertools.pairwise(ends[5:]))
    if mode == "early":
        updates = [start for row, start, _ in spans if row == ROWS[4]]
        steps = [step for step in steps if sum(step[0] < start < step[1] for start in updates) > 6]
    return sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, required=True)
    parser.add_argument("--layer-ms", type=float, default=2.0, help="simulated forward of one layer on the device")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipeline._OverBus.bytes_per_second = 12e9
    spans: list[Span] = []
    main_thread = threading.get_ident()
    record(spans, pipeline.Device, "_compute", ROWS[0])
    record(spans, pipeline._Bus, "_down", ROWS[1])
    record(spans, pipeline._Bus, "_up", ROWS[2])
    record(spans, UnitUpdate, "run", lambda *args: ROWS[3 if threading.get_ident() == main_thread else 4])
    figure, axes = plt.subplots(len(MODES), 1, figsize=(10, 6), sharex=True, layout="constrained")
    for mode, axis in zip(MODES, axes):
        spans.clear()
        ends = Ends()
        pipeline.step_seconds(mode, 1024, 12, options.layer_ms / 1e3, options.steps, ends)
        begin, end = median_step(spans, ends.times, mode)
        for row, start, stop in spans:
            if start < end and stop > begin:
                at = ROWS.index(row)
                start, stop = max(start, begin), min(stop, end)
                axis.barh(at, 1e3 * (stop - start), left=1e3 * (start - begin), height=0.7, color=COLORS[at], edgecolor="white", lw=0.4)
        axis.axvline(1e3 * (end - begin), color="black", lw=1)
        axis.set_yticks(range(len(ROWS)), ROWS)
        axis.set_ylim(len(ROWS) - 0.4, -0.6)
        axis.set_title(f"{mode}: {1e3 * (end - begin):.0f} ms", loc="left", fontsize=10)
        print(f"{mode}: {1e3 * (end - begin):.1f} ms")
    axes[-1].set_xlabel("ms since the end of the step before")
    figure.savefig(options.plot, dpi=110)


if __name__ == "__main__":
    main()
