"""Does one step late cost convergence? The GPT example, exact and delayed, from the same start on the same batches.

    python benchmarks/delayed_update.py --steps 400 --plot docs/images/delayed_update.png

Prints the loss (a running mean over 20 steps) and draws the curves, for each learning rate.
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


def losses(strategy: ZeroStrategy, rate: float, steps: int, seed: int) -> list[float]:
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
        trainer.fit(GPT(learning_rate=rate), DataLoader(data.training, data.batch_size, shuffle=True, drop_last=True))
    return recorder.smooth()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 4e-3], help="peak learning rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", help="write the curves to this file (needs matplotlib)")
    args = parser.parse_args()
    curves = {}
    for rate in args.rates:
        for name, late in (("exact", False), (f"one step late from step {WARM_UP}", WARM_UP)):
            strategy = ZeroStrategy(stage=2, offload=True, delayed_update=late)
            curve = curves[f"rate {rate:g}, {name}"] = losses(strategy, rate, args.steps, args.seed)
            shown = ", ".join(f"{curve[i]:.3f}" for i in range(0, len(curve), max(1, len(curve) // 8)))
            print(f"rate {rate:g}, {name:27} {shown} ... {curve[-1]:.3f}", flush=True)
    if args.plot:
        draw(curves, args.plot)


def draw(curves: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for number, (name, curve) in enumerate(curves.items()):
        # A color for each rate, dashed where late.
        axes.plot(range(WINDOW, WINDOW + len(curve)), curve, f"C{number // 2}{('-', '--')[number % 2]}", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, mean of {WINDOW} steps")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
