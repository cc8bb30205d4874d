"""What gathering in 8 bits (gather_dtype=torch.int8) does to the loss, the bytes and the time of a step: two ranks.

    python benchmarks/coded_gather.py --json result.json

First the GPT example's own model, data and schedule: training loss (mean of the last 20 steps) and validation loss at the
end, with and without. Then the time of a step of a wider one, for --rate: between the ranks, which share a machine, a sender
is free again only after bytes / rate, so that all that is sent goes through one link of that speed, both ways at once.
Without a rate the link is the machine's memory.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_zero import ZeroStrategy
from lightning_zero.pairs import Pairs
from lightning_zero.tables import new_table, render
from lightning_zero.work import Exchange

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, StandardLibraryText

GATHERS = {"fp32": None, "int8": torch.int8}
TAIL = 20


class SlowWire:
    """All sends of a rank through one link of ``rate`` bytes per second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._exchange = Pairs.exchange

    def install(self) -> None:
        def exchange(pairs: Pairs, what: str, tag: int, sends: dict[int, torch.Tensor], *rest: Any) -> Exchange:
            under_way = self._exchange(pairs, what, tag, sends, *rest)
            nbytes = sum(tensor.nbytes for tensor in sends.values())
            self._free = max(self._free, time.perf_counter()) + nbytes / self._rate
            under_way.add("the slow link", Until(self._free))
            return under_way

        Pairs.exchange = exchange  # type: ignore[method-assign]


class Until:
    def __init__(self, moment: float) -> None:
        self._moment = moment

    def done(self) -> bool:
        return time.perf_counter() >= self._moment

    def wait(self) -> None:
        time.sleep(max(0.0, self._moment - time.perf_counter()))


class Meter(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []
        self.sent: list[dict[str, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.times.append(time.perf_counter() - self._start)
        self.losses.append(float(outputs["loss"]))
        self.sent.append({name: found["bytes"] for name, found in trainer.strategy.comm_stats().items()})


def train(name: str, rate: float | None, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    if rate:
        SlowWire(1e6 * rate).install()
    timed = rate is not None
    module, meter = GPT(width=args.width, depth=args.depth) if timed else GPT(), Meter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=3, gather_dtype=GATHERS[name]),
            max_steps=args.timed_steps if timed else args.steps, limit_val_batches=0 if timed else 40, callbacks=[meter],
            gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, StandardLibraryText())
        validation = 0.0 if timed else trainer.validate(module, StandardLibraryText(), verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        step = {key: meter.sent[-1][key] - meter.sent[-2][key] for key in ("all_gather", "reduce_scatter")}
        found = {
            "training": statistics.mean(meter.losses[-TAIL:]), "validation": validation, "sent": step,
            "seconds": statistics.median(meter.times[len(meter.times) // 4 :]), "losses": meter.losses,
        }  # fmt: skip
        print("result", json.dumps(found))


def measured(name: str, rate: float | None) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--row", name, *([] if rate is None else ["--at", str(rate)])]
    run = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^result (.*)$", run.stdout, re.MULTILINE)
    if found is None:
        sys.exit(f"{name} has failed:\n{run.stderr}")
    return json.loads(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--timed-steps", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rate", type=float, nargs="*", default=[0, 100, 25], metavar="MB/S", help="0: as it is")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--row", choices=GATHERS, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        return train(args.row, args.at, args)
    learned = {name: measured(name, None) for name in GATHERS} if args.steps else {}
    table = new_table("training loss", "validation loss", "gathered\nkB per step", "reduced\nkB per step")
    for name, row in learned.items():
        sent = (f"{row['sent'][kind] / 1e3:.0f}" for kind in ("all_gather", "reduce_scatter"))
        table.add_row(name, f"{row['training']:.4f}", f"{row['validation']:.4f}", *sent)
    print(render(table, [f"GPT example, {args.steps} steps, two ranks, fp32"]))
    timed = {rate: {name: measured(name, rate) for name in GATHERS} for rate in args.rate}
    table = new_table("fp32 s", "int8 s", "ratio")
    for rate, rows in timed.items():
        exact, coded = (rows[name]["seconds"] for name in GATHERS)
        table.add_row(f"{rate:g} MB/s" if rate else "as it is", f"{exact:.3f}", f"{coded:.3f}", f"{coded / exact:.2f}")
    print(render(table, [f"Seconds of a step, {args.depth} blocks of width {args.width}"]))
    if args.json:
        args.json.write_text(json.dumps({"learned": learned, "timed": timed}, indent=2))


if __name__ == "__main__":
    main()
