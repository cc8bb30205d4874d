"""What MemoryMonitor costs: the GPT example on one rank, with it at its default interval and without, in turns.

    python benchmarks/memory_monitor.py --rounds 6

Prints the median over rounds of the time of a run's steps with the monitor over the time without.
"""

import argparse
import statistics
import sys
import tempfile
import time
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


def run_seconds(data: StandardLibraryText, monitored: bool, steps: int) -> float:
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=ZeroStrategy(stage=2), precision="bf16-true", max_steps=steps,
            callbacks=[*([MemoryMonitor()] if monitored else []), clock], logger=CSVLogger(folder), log_every_n_steps=50,
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
    ratios = []
    for number in range(args.rounds):
        # Whoever is first in a round has the colder caches: they take turns at that as well.
        seconds = {which: run_seconds(data, which, args.steps) for which in (number % 2 == 0, number % 2 == 1)}
        ratios.append(seconds[True] / seconds[False])
    spread = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    print(f"with MemoryMonitor over without: {statistics.median(ratios):.3f} (rounds: {spread})")


if __name__ == "__main__":
    main()
