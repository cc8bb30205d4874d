"""What MemoryMonitor costs at its default interval: the GPT example on one rank, with it and without, in turns.

    python benchmarks/memory_monitor.py --rounds 6

Prints the share of a run's time that passes in the monitor's hooks, and the median over rounds of the time of a run's
steps with the monitor over the time without: the first is exact to a few hundredths of a percent, the second also has
what the hooks may cost elsewhere, and the noise of the machine, which is larger than either.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_zero import MemoryMonitor, ZeroStrategy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, StandardLibraryText


class Clock(pl.Callback):
    """Seconds from the end of the third batch to the end of the last."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.start = time.perf_counter()
        self.end = time.perf_counter()


class TimedMonitor(MemoryMonitor):
    """Adds up the seconds in its own hooks between ``on_train_start`` and ``on_train_end``, those two left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._clock.end_update = self._timed(self._clock.end_update)  # called by the optimizer
        for name in ("batch_start", "batch_end", "epoch_end"):
            setattr(self, f"on_train_{name}", self._timed(getattr(self, f"on_train_{name}")))
        for name in ("backward", "optimizer_step"):
            setattr(self, f"on_before_{name}", self._timed(getattr(self, f"on_before_{name}")))

    def _timed(self, hook: Callable[..., None]) -> Any:
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            hook(*args)
            self.seconds += time.perf_counter() - start

        return timed


def run_seconds(data: StandardLibraryText, monitor: TimedMonitor | None, steps: int) -> float:
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=ZeroStrategy(stage=2), precision="bf16-true", max_steps=steps,
            callbacks=[clock] if monitor is None else [monitor, clock], logger=CSVLogger(folder), log_every_n_steps=50,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(GPT(), DataLoader(data.training, data.batch_size, drop_last=True))
    return clock.end - clock.start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=103, help="steps of a run; the first three are not timed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = StandardLibraryText()
    data.setup("fit")
    ratios, shares = [], []
    for number in range(args.rounds):
        monitor = TimedMonitor()
        seconds = {}
        # Whoever is first in a round has the colder caches: they take turns at that as well.
        for monitored in (number % 2 == 0, number % 2 == 1):
            seconds[monitored] = run_seconds(data, monitor if monitored else None, args.steps)
        ratios.append(seconds[True] / seconds[False])
        shares.append(monitor.seconds / seconds[True])
    print(f"{1e3 * statistics.median(seconds.values()) / (args.steps - 3):.1f} ms per step")
    print(f"in MemoryMonitor's hooks: {statistics.median(shares):.3%} of the time (at most {max(shares):.3%})")
    spread = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    print(f"with MemoryMonitor over without: {statistics.median(ratios):.3f} (rounds: {spread})")


if __name__ == "__main__":
    main()
