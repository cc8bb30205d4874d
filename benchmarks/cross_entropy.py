"""Time and peak memory of the fused losses against torch's, and Liger's where it is installed.

    python benchmarks/cross_entropy.py [--rows 1024] [--classes 32000] [--features 256] [--threads 2] [--json FILE]

Two workloads, forward and backward each: a loss of given logits, and a last layer with its loss. All competitors of a
workload share one process and take turns, the order turning each round, so a noisy neighbour hits all of them. What counts
is the ratio within a round; the table gives the median and the quartiles of time / ours. `extra` is the most memory that
was alive at one time beyond the inputs and, for the last layer, the gradients that are asked for, in units of the logits in their own
dtype: tensor bytes counted at every operation, in a run of its own.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.ops import fused_cross_entropy, fused_linear_cross_entropy, native_isa

OURS = "lightning_zero"
Step = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One competitor in one workload."""

    workload: str
    dtype: str
    name: str
    milliseconds: float
    ratio: float
    """Median over rounds of its time / ours."""
    ratio_quartiles: tuple[float, float]
    extra: float
    """Peak bytes / bytes of the logits."""


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def loss_of_logits(rows: int, classes: int, dtype: torch.dtype) -> dict[str, Step]:
    """Each starts from a copy of the logits, as a layer would have made them."""
    leaf = torch.randn(rows, classes).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,))

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
        return lambda: torch.autograd.grad(loss(leaf.clone(), target), leaf)

    steps = {
        OURS: step(lambda x, t: fused_cross_entropy(x, t, inplace=True)),
        "lightning_zero, beside": step(fused_cross_entropy),
        "F.cross_entropy": step(F.cross_entropy),
    }
    if dtype != torch.float32:
        steps["F.cross_entropy, autocast"] = step(lambda x, t: F.cross_entropy(x.float(), t))
    return steps


def last_layer(rows: int, classes: int, features: int, dtype: torch.dtype) -> dict[str, Step]:
    hidden = torch.randn(rows, features).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features) / features**0.5).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,))

    def step(loss: Callable[[], Tensor]) -> Step:
        return lambda: torch.autograd.grad(loss(), (hidden, weight))

    steps = {
        OURS: step(lambda: fused_linear_cross_entropy(hidden, weight, target)),
        "linear + fused, in place": step(lambda: fused_cross_entropy(F.linear(hidden, weight), target, inplace=True)),
        "linear + F.cross_entropy": step(lambda: F.cross_entropy(F.linear(hidden, weight), target)),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions
        chunk = options(batch_chunk_size=min(rows, max(256, rows * features // classes)), chunking_method=None)
        steps["torch chunked, auto"] = step(lambda: F.linear_cross_entropy(hidden, weight, target, options=options()))
        steps["torch chunked, our chunks"] = step(lambda: F.linear_cross_entropy(hidden, weight, target, options=chunk))
    if torch.cuda.is_available() and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        steps["Liger"] = step(lambda: liger(weight, hidden, target))
    return steps


def peak_bytes(step: Step) -> int:
    gc.collect()
    with PeakBytes() as counted:
        step()
    return counted.peak


def measure(
    workload: str, dtype: torch.dtype, steps: dict[str, Step], rounds: int, logits: int, grads: int
) -> list[Row]:
    peaks = {name: peak_bytes(step) for name, step in steps.items()}  # warms up, too
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    rows = []
    for name in names:
        ratios = [a / b for a, b in zip(times[name], times[OURS])]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            Row(
                workload, str(dtype).removeprefix("torch."), name, 1000 * statistics.median(times[name]),
                statistics.median(ratios), (low, high), (peaks[name] - grads) / logits,
            )
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--classes", type=int, default=32_000)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, classes, features = arguments.rows, arguments.classes, arguments.features
    print(f"{rows} rows, {classes} classes, {features} features, {arguments.threads} threads, {native_isa()}\n")
    print("workload    dtype     competitor                     ms  x ours    quartiles    extra")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = rows * classes * dtype.itemsize
        layer_grads = (rows + classes) * features * dtype.itemsize
        for workload, steps, grads in (
            ("loss", loss_of_logits(rows, classes, dtype), 0),
            ("last layer", last_layer(rows, classes, features, dtype), layer_grads),
        ):
            for row in measure(workload, dtype, steps, arguments.rounds, logits, grads):
                low, high = row.ratio_quartiles
                print(
                    f"{row.workload:<11} {row.dtype:<9} {row.name:<26} {row.milliseconds:>7.0f} {row.ratio:>7.2f} "
                    f"{low:>6.2f}-{high:<6.2f} {row.extra:>6.2f}",
                    flush=True,
                )
                results.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in results], indent=1))


if __name__ == "__main__":
    main()
