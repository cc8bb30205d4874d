"""Does one step late cost convergence? The GPT example, exact and delayed, from the same start on the same batches.

    python benchmarks/delayed_update.py --steps 400 --plot docs/images/delayed_update.png

Prints the loss (a running mean over 20 steps) and draws both curves.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, StandardLibraryText

WINDOW = 20
WARM_UP = 40


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.values.append(float(outputs["loss"]))

    def smooth(self) -> list[float]:
        return [sum(self.values[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(self.values) + 1)]


def losses(strategy: ZeroStrategy, steps: int, seed: int) -> list[float]:
    pl.seed_everything(seed, verbose=False)
    data = StandardLibraryText()
    data.setup("fit")
    recorder = Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, callbacks=[recorder], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        torch.manual_seed(seed)
        trainer.fit(GPT(), DataLoader(data.training, data.batch_size, shuffle=True, drop_last=True))
    return recorder.smooth()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", help="write the curves to this file (needs matplotlib)")
    args = parser.parse_args()
    curves = {
        "exact": losses(ZeroStrategy(stage=2, offload=True), args.steps, args.seed),
        f"one step late from step {WARM_UP}": losses(
            ZeroStrategy(stage=2, offload=True, delayed_update=WARM_UP), args.steps, args.seed
        ),
    }
    for name, curve in curves.items():
        shown = ", ".join(f"{curve[i]:.3f}" for i in range(0, len(curve), max(1, len(curve) // 8)))
        print(f"{name:28} {shown} ... {curve[-1]:.3f}")
    if args.plot:
        draw(curves, args.plot)


def draw(curves: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(WINDOW, WINDOW + len(curve)), curve, style, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, mean of {WINDOW} steps")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
