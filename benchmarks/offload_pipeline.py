"""What hides the host's step: at once, early, or one step late, beside a device that computes on its own.

    python benchmarks/offload_pipeline.py --rounds 5 --json result.json

The device is simulated: each layer's backward sleeps for as long as a device would compute, so the host's cores are free
as they are beside a real one. Modes take turns in every round; reported are medians of a mode's time over that of the
step at once in the same round, and how much of the host's step was hidden.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.config import OffloadConfig


class _Busy(torch.autograd.Function):
    """Passes its input on; backward takes ``seconds``, in which the host is idle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Layers(pl.LightningModule):
    def __init__(self, width: int, depth: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.seconds = seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = _Busy.apply(layer(batch), self.seconds)
        return batch.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(pl.Callback):
    """Median seconds of a step, without the first three."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter() - self.start)

    @property
    def median(self) -> float:
        return statistics.median(self.times[3:])


MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "at once": ({"offload": True}, {}),
    "early": ({"offload": OffloadConfig(early_update=True)}, {}),
    "early, clipping that seldom clips": ({"offload": OffloadConfig(early_update=True)}, {"gradient_clip_val": 1e9}),
    "early, clipping that always clips": ({"offload": OffloadConfig(early_update=True)}, {"gradient_clip_val": 1e-9}),
    "one step late": ({"offload": True, "delayed_update": 1}, {}),
}


def step_seconds(mode: str, width: int, depth: int, seconds: float, steps: int) -> float:
    strategy, settings = MODES[mode]
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=ZeroStrategy(stage=2, unit_size_mb=width * width * 2 / 2**20, **strategy),
            precision="bf16-true", max_steps=steps, callbacks=[clock], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **settings,
        )  # fmt: skip
        trainer.fit(Layers(width, depth, seconds), DataLoader(torch.randn(steps * 2, width), batch_size=2))
    return clock.median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps of a mode in a round")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--layer-ms", type=float, default=8.0, help="simulated backward of one layer on the device")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = args.layer_ms / 1e3
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            times[mode].append(step_seconds(mode, args.width, args.depth, seconds, args.steps))
    base = times["at once"]
    print(f"{args.depth} layers of {args.width} x {args.width}, {args.depth * args.layer_ms:g} ms of backward on the device")
    rows = {}
    for mode, measured in times.items():
        ratio = statistics.median(t / b for t, b in zip(measured, base, strict=True))
        rows[mode] = {"ms": 1e3 * statistics.median(measured), "of_at_once": ratio}
        print(f"{mode:36} {rows[mode]['ms']:8.1f} ms   {ratio:.2f} of the step at once")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "modes": rows}, file, indent=1)


if __name__ == "__main__":
    main()
