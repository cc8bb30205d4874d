"""What hides the host's step: at once, early, or one step late, beside a device that computes on its own.

    python benchmarks/offload_pipeline.py --rounds 5 --json result.json

The device is simulated. It has a queue, as a real one: each layer's forward and backward are put there, and the host goes on
at once; what is in the queue takes its time one after the other, in which the host's cores are free. Gradients are numbers
that were made before; each copy between the two begins when what was queued before it is done, and takes as long as it would
over a bus; what is queued after the gather of new weights waits for them. Modes take turns in every round; reported are
medians of the time of a step (from one to the next) over that of the step at once with the same clipping in the same round.
"floor" is what no host can be faster than: the device's time and, from its end on, the last unit's gradients over the bus.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.config import OffloadConfig
from lightning_zero.transfer import HostPool, Link, Transfer


class Device:
    """Does what is put in its queue, one after the other."""

    def __init__(self) -> None:
        self._queue = ThreadPoolExecutor(1)
        self._free = 0.0
        """When what has been done so far was done: sleeps that are late do not add up."""

    def compute(self, seconds: float) -> None:
        self._queue.submit(self._compute, seconds)

    def _compute(self, seconds: float) -> None:
        self._free = max(self._free, time.perf_counter() - 1e-3) + seconds
        time.sleep(max(0.0, self._free - time.perf_counter()))

    def wait_for(self, copy: Future) -> None:
        self._queue.submit(copy.result)

    def mark(self) -> Future:
        """Done when all is done that is in the queue so far."""
        return self._queue.submit(lambda: None)


DEVICE = Device()


class _OnDevice(torch.autograd.Function):
    """A layer that takes the device ``seconds`` in forward, twice that in backward, and the host no time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grad: Tensor, seconds: float) -> Tensor:
        ctx.grad, ctx.seconds = grad, seconds
        DEVICE.compute(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        DEVICE.compute(2 * ctx.seconds)
        return grad, ctx.grad, None, None


class _Bus(HostPool):
    """The way to the simulated device: copies in one direction follow each other, and the host may go on meanwhile."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__(pin_memory=False)
        self._bytes_per_second = bytes_per_second
        self._directions = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def download(self, source: Tensor, target: Tensor) -> Transfer:
        return _Copy(self._directions[0].submit(self._copy_down, DEVICE.mark(), source, target))

    def upload(self, source: Tensor, target: Tensor) -> Transfer:
        return _Copy(self._directions[1].submit(self._copy_up, DEVICE.mark(), source, target))

    def _copy_down(self, queued_before: Future, source: Tensor, target: Tensor) -> None:
        queued_before.result()
        self._down(source, target)

    def _copy_up(self, queued_before: Future, source: Tensor, target: Tensor) -> None:
        queued_before.result()
        self._up(source, target)

    def _down(self, source: Tensor, target: Tensor) -> None:
        self._copy(source, target)

    def _up(self, source: Tensor, target: Tensor) -> None:
        self._copy(source, target)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        end = time.perf_counter() + source.nbytes / self._bytes_per_second
        target.copy_(source)
        time.sleep(max(0.0, end - time.perf_counter()))


class _Copy:
    def __init__(self, future: Future) -> None:
        self._future = future

    def wait(self) -> None:
        DEVICE.wait_for(self._future)

    def synchronize(self) -> None:
        self._future.result()


class _OverBus(ZeroStrategy):
    """Takes this host for a device at the other end of a bus."""

    bytes_per_second = 0.0

    def _make_link(self) -> Link:
        return _Bus(self.bytes_per_second)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor, grad: Tensor, seconds: float) -> Tensor:
        return _OnDevice.apply(x, self.weight, grad, seconds)


class Layers(pl.LightningModule):
    def __init__(self, width: int, depth: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.grad = torch.randn(width, width, dtype=torch.bfloat16)
        self.seconds = seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch, self.grad, self.seconds)
        return batch.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(pl.Callback):
    """Seconds from the end of a step to that of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def median(self) -> float:
        """Of the second half of the steps: before, early updates are tried out."""
        times = [end - start for start, end in zip(self.ends, self.ends[1:])]
        return statistics.median(times[len(times) // 2 :])


CLIPPING = {"": None, ", clipping that seldom clips": 1e9, ", clipping that always clips": 1e-9}
WAYS: dict[str, dict[str, Any]] = {
    "at once": {"offload": True},
    "early": {"offload": OffloadConfig(early_update=True)},
    "one step late": {"offload": True, "delayed_update": 1},
}
MODES = {way + clipping: (WAYS[way], {"gradient_clip_val": value}) for clipping, value in CLIPPING.items() for way in WAYS}


def step_seconds(mode: str, width: int, depth: int, seconds: float, steps: int, *callbacks: pl.Callback) -> float:
    strategy, settings = MODES[mode]
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=_OverBus(stage=2, unit_size_mb=width * width * 2 / 2**20, **strategy),
            precision="bf16-true", max_steps=steps, callbacks=[clock, *callbacks], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **settings,
        )  # fmt: skip
        trainer.fit(Layers(width, depth, seconds), DataLoader(torch.randn(steps, 8), batch_size=1))
    return clock.median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps of a mode in a round")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--layer-ms", type=float, default=3.0, help="simulated forward of one layer on the device")
    parser.add_argument("--bus-gb", type=float, default=12.0, help="GB/s of the simulated bus, in each direction")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds, _OverBus.bytes_per_second = args.layer_ms / 1e3, 1e9 * args.bus_gb
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            times[mode].append(step_seconds(mode, args.width, args.depth, seconds, args.steps))
    device = 3 * args.depth * args.layer_ms
    floor = device + 2e3 * args.width**2 / _OverBus.bytes_per_second
    print(
        f"{args.depth} layers of {args.width} x {args.width}, {device:g} ms of forward and backward on the device,"
        f" floor {floor:.1f} ms"
    )
    rows = {}
    for mode, measured in times.items():
        base = times["at once" + next(name for name in reversed(CLIPPING) if mode.endswith(name))]
        ratio = statistics.median(t / b for t, b in zip(measured, base, strict=True))
        exposed = statistics.median(base) - floor / 1e3
        hidden = statistics.median((b - t) / exposed for t, b in zip(measured, base, strict=True))
        rows[mode] = {"ms": 1e3 * statistics.median(measured), "of_at_once": ratio, "hidden": hidden}
        print(f"{mode:42} {rows[mode]['ms']:8.1f} ms   {ratio:.2f} of the step at once, {hidden:4.0%} of {1e3 * exposed:.0f} ms hidden")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "modes": rows}, file, indent=1)


if __name__ == "__main__":
    main()
