"""Peak memory of a training step with each part of ZeRO-R on and off: a GPT with a vocabulary of 32 000, two ranks.

    python benchmarks/activation_memory.py --json result.json

Every row is a run of its own. Reported is what the memory of rank 0 grew by from before the fit to its peak in the steps
(the kernel's own account of resident memory), and of that the model states, which the strategy counts. All rows but the
first train the same weights to the same loss.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.tables import new_table, render

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT

VOCABULARY = 32_000
RECOMPUTE: dict[str, Any] = {"activation_checkpointing_policy": ["blocks.*"]}
# Name, strategy, loss.
ROWS: dict[str, tuple[str | dict[str, Any], str]] = {
    "DDP": ("ddp", "torch"),
    "stage 3": ({"stage": 3}, "torch"),
    "stage 3, recompute": ({"stage": 3, **RECOMPUTE}, "torch"),
    "stage 3, fused loss": ({"stage": 3}, "fused"),
    "stage 3, recompute, fused loss": ({"stage": 3, **RECOMPUTE}, "fused"),
    "stage 3, recompute, loss in chunks": ({"stage": 3, **RECOMPUTE}, "chunked"),
}


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[1])  # type: ignore[index]


class Meter(pl.Callback):
    """The peak from the second step on: the first one makes what stays."""

    peak = 0
    states = 0
    loss = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.loss = float(outputs["loss"])
        self.peak = resident("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        if isinstance(trainer.strategy, ZeroStrategy):
            self.states = sum(trainer.strategy.memory_stats()["now"].values())
        else:
            self.states = 16 * sum(p.numel() for p in module.parameters())


def train(name: str, args: argparse.Namespace) -> None:
    strategy, loss = ROWS[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8 * args.batch, args.context + 1))
    before = resident("VmRSS")
    module = GPT(args.context, args.width, args.depth, args.width // 64, vocabulary=VOCABULARY, loss=loss)  # type: ignore[arg-type]
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy if isinstance(strategy, str) else ZeroStrategy(**strategy),
            max_steps=3, callbacks=[meter], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        pairs = [(window[:-1], window[1:]) for window in tokens]
        trainer.fit(module, DataLoader(pairs, batch_size=args.batch))
    if trainer.is_global_zero:
        print("result", json.dumps({"peak": meter.peak - before, "states": meter.states, "loss": meter.loss}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="windows of --context tokens, on each rank")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        return train(args.row, args)
    results = {}
    table = new_table("peak MB", "model states MB", "the rest MB", "loss")
    for name in ROWS:
        run = subprocess.run([sys.executable, *sys.argv, "--row", name], capture_output=True, text=True)
        found = re.search(r"^result (.*)$", run.stdout, re.MULTILINE)
        if found is None:
            sys.exit(f"{name} has failed:\n{run.stderr}")
        row = results[name] = json.loads(found[1])
        sizes = (row["peak"], row["states"], row["peak"] - row["states"])
        table.add_row(name, *(f"{nbytes / 1e6:.0f}" for nbytes in sizes), f"{row['loss']:.4f}")
    print(render(table, [f"Two ranks, {args.batch} x {args.context} tokens each, fp32"]))
    if args.json:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.processor()}
        settings = {key: value for key, value in vars(args).items() if isinstance(value, int)}
        args.json.write_text(json.dumps({"machine": machine, "settings": settings, "rows": results}, indent=2))


if __name__ == "__main__":
    main()
