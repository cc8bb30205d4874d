"""Time one CPU Adam step against torch's optimizers, DeepSpeed's where installed, and the memory's own limit.

    python benchmarks/cpu_adam.py [--sizes 1 16] [--threads 1 2] [--json FILE]

Three workloads: the plain fp32 step; the cycle that offloading runs (bf16 gradients in, bf16 parameters out); and that
cycle with clipping by norm. All competitors of a workload share one process and one set of buffers and take turns, the
order rotating each round, so a noisy neighbour hits all of them. What counts is the ratio within a round: the table
gives the median and quartiles of time / ours, and the median for CPU time. `busy` is CPU time / (threads x wall).
`roof` moves the same bytes with next to no arithmetic.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from lightning_zero.ops import AdamOptions, adam_step_, native_isa, sum_of_squares

OURS = "lightning_zero"
OPTIONS = AdamOptions(lr=1e-3, weight_decay=0.01)
BYTES = 28  # per parameter in each workload: p, m, v read and written; 4 for the gradient, or 2 and 2 for the copy
Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One competitor in one workload."""

    workload: str
    numel: int
    threads: int
    name: str
    ns_per_param: float
    gb_per_s: float
    ratio: float
    """Median over rounds of its time / ours."""
    ratio_quartiles: tuple[float, float]
    cpu_ratio: float
    """The same of process CPU time: steadier where others use the cores, but counts threads that spin."""
    cpu_share: float
    """Process CPU time / (threads x wall); well under 1 in our row says that others had the cores."""


class Buffers:
    """What all competitors work on."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numel = numel
        self.p = torch.nn.Parameter(torch.randn(numel, generator=generator))
        self.g16 = (torch.randn(numel, generator=generator) * 1e-2).bfloat16()
        self.g32 = self.g16.float()
        self.m = torch.zeros(numel)
        self.v = self.g32.square()
        self.copy = torch.empty(numel, dtype=torch.bfloat16)

    def ours(self, grad: Tensor, copy: Tensor | None, threads: int, scale: float = 1.0) -> None:
        adam_step_(
            self.p, grad, self.m, self.v, OPTIONS, step=10, param_copy=copy, grad_scale=scale, num_threads=threads
        )

    def torch_adamw(self, **kind: bool) -> AdamW:
        optimizer = AdamW([self.p], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay, **kind)
        optimizer.state[self.p] = {"step": torch.tensor(10.0), "exp_avg": self.m, "exp_avg_sq": self.v}
        return optimizer

    def step_with(self, optimizer: Any, grad: Tensor) -> None:
        self.p.grad = grad
        optimizer.step()


def load_roof() -> ctypes.CDLL | None:
    """Compile the traffic skeleton; None without a compiler."""
    source = Path(__file__).with_name("adam_roof.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "roof.so")
        compiler = os.environ.get("CXX", "c++")
        flags = ["-std=c++17", "-O3", "-march=native", "-w", "-shared", "-fPIC", "-pthread"]
        with suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True, capture_output=True)
            return ctypes.CDLL(str(library))
    return None


def roof_step(roof: ctypes.CDLL, b: Buffers, threads: int, *, bf16: bool) -> Step:
    pointers = [b.p, b.m, b.v, *((b.g16, b.copy) if bf16 else (b.g32,))]
    arguments = [*(ctypes.c_void_p(t.data_ptr()) for t in pointers), ctypes.c_float(0.0)]
    function = roof.roof_bf16 if bf16 else roof.roof_fp32
    return lambda: function(*arguments, ctypes.c_int64(b.numel), ctypes.c_int(threads))


def deepspeed_adam(b: Buffers) -> Any:
    with suppress(Exception):  # not installed, or its kernel does not build here
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([b.p], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay)
        optimizer.state[b.p] = {"step": 10, "exp_avg": b.m, "exp_avg_sq": b.v}
        return optimizer
    return None


def plain_steps(b: Buffers, threads: int, roof: ctypes.CDLL | None, slow: bool) -> Iterator[tuple[str, Step]]:
    yield OURS, lambda: b.ours(b.g32, None, threads)
    if roof is not None:
        yield "roof", roof_step(roof, b, threads, bf16=False)
    fused = b.torch_adamw(fused=True)
    yield "torch fused", lambda: b.step_with(fused, b.g32)
    if slow:
        foreach = b.torch_adamw(foreach=True)
        yield "torch foreach", lambda: b.step_with(foreach, b.g32)
    if (deepspeed := deepspeed_adam(b)) is not None:
        yield "DeepSpeed", lambda: b.step_with(deepspeed, b.g32)


def cycle_steps(b: Buffers, threads: int, roof: ctypes.CDLL | None, slow: bool) -> Iterator[tuple[str, Step]]:
    def cycle(optimizer: Any, *, unscale: bool = False, allocate: bool = False) -> None:
        grad = b.g16.float() if allocate else b.g32.copy_(b.g16)
        if unscale:
            grad.mul_(1.0)
        b.step_with(optimizer, grad)
        b.copy.copy_(b.p.detach())

    yield OURS, lambda: b.ours(b.g16, b.copy, threads)
    if roof is not None:
        yield "roof", roof_step(roof, b, threads, bf16=True)
    fused = b.torch_adamw(fused=True)
    yield "torch fused", lambda: cycle(fused)
    yield "torch fused + unscale", lambda: cycle(fused, unscale=True)
    if slow:
        yield "torch fused, .float()", lambda: cycle(fused, allocate=True)
        foreach = b.torch_adamw(foreach=True)
        yield "torch foreach", lambda: cycle(foreach)
    if (deepspeed := deepspeed_adam(b)) is not None:
        yield "DeepSpeed", lambda: cycle(deepspeed)
        yield "DeepSpeed + unscale", lambda: cycle(deepspeed, unscale=True)


def clip_steps(b: Buffers, threads: int, roof: ctypes.CDLL | None, slow: bool) -> Iterator[tuple[str, Step]]:
    def ours() -> None:
        norm = sum_of_squares(b.g16, num_threads=threads) ** 0.5
        b.ours(b.g16, b.copy, threads, scale=min(1.0, 1.0 / norm))

    def clipped(optimizer: Any) -> None:
        b.g32.copy_(b.g16)
        norm = torch.linalg.vector_norm(b.g32).item()
        b.g32.mul_(min(1.0, 1.0 / norm))
        b.step_with(optimizer, b.g32)
        b.copy.copy_(b.p.detach())

    yield OURS, ours
    fused = b.torch_adamw(fused=True)
    yield "torch fused", lambda: clipped(fused)
    if (deepspeed := deepspeed_adam(b)) is not None:
        yield "DeepSpeed", lambda: clipped(deepspeed)


WORKLOADS = {"plain fp32": plain_steps, "bf16 cycle": cycle_steps, "bf16 cycle, clipped": clip_steps}


def check_bits() -> None:
    """Timings of a wrong result mean nothing: compare with torch's fused step where its arithmetic is fused, too."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return
    ours, theirs = Buffers(4096), Buffers(4096)
    ours.ours(ours.g32, None, 1)
    optimizer = theirs.torch_adamw(fused=True)
    optimizer.state[theirs.p]["step"] -= 1  # torch counts the step itself
    theirs.step_with(optimizer, theirs.g32)
    for name in ("p", "m", "v"):
        if not torch.equal(getattr(ours, name), getattr(theirs, name)):
            raise RuntimeError(f"{name} differs from torch's fused AdamW")


def measure(workload: str, numel: int, threads: int, rounds: int, roof: ctypes.CDLL | None, slow: bool) -> list[Row]:
    torch.set_num_threads(threads)
    b = Buffers(numel)
    competitors = list(WORKLOADS[workload](b, threads, roof, slow))
    repeats = max(1, (4 << 20) // numel)
    wall: dict[str, list[float]] = {name: [] for name, _ in competitors}
    cpu: dict[str, list[float]] = {name: [] for name, _ in competitors}
    warm = torch.zeros(1 << 17)
    for turn in range(rounds + 1):
        shift = turn % len(competitors)
        for name, step in competitors[shift:] + competitors[:shift]:
            warm.add_(1)  # torch's threads awake, as they are right after a backward pass
            cpu_start, start = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                step()
            stop, cpu_stop = time.perf_counter(), time.process_time()
            if turn > 0:  # the first round touches pages and builds states
                wall[name].append(stop - start)
                cpu[name].append(cpu_stop - cpu_start)
    rows = []
    for name, _ in competitors:
        seconds = statistics.median(wall[name]) / repeats
        ratios = [theirs / ours for theirs, ours in zip(wall[name], wall[OURS])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cpu_ratio = statistics.median(theirs / ours for theirs, ours in zip(cpu[name], cpu[OURS]))
        share = sum(cpu[name]) / (threads * sum(wall[name]))
        nanoseconds = seconds * 1e9 / numel
        gb_per_s = BYTES / nanoseconds
        rows.append(Row(workload, numel, threads, name, nanoseconds, gb_per_s, middle, (low, high), cpu_ratio, share))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16], help="millions of parameters (128 needs 3 GB)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--all", action="store_true", help="also torch's foreach and allocating forms, which are far slower"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()

    check_bits()
    roof = load_roof()
    rows: list[Row] = []
    print(
        f"kernels: {native_isa()}; torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}); "
        f"load {os.getloadavg()[0]:.1f}" + ("" if roof else "; no compiler, so no roof")
    )
    for workload in options.workloads:
        for millions in options.sizes:
            for threads in options.threads:
                print(f"\n{workload}, {millions}M parameters, {threads} thread(s)")
                print(
                    f"  {'':24}{'ns/param':>9}{'GB/s':>7}{'time/ours':>11}{'quartiles':>14}{'cpu/ours':>10}{'busy':>6}"
                )
                new = measure(workload, millions << 20, threads, options.rounds, roof, options.all)
                for row in new:
                    low, high = row.ratio_quartiles
                    print(
                        f"  {row.name:24}{row.ns_per_param:9.3f}{row.gb_per_s:7.1f}{row.ratio:11.2f}"
                        f"{low:9.2f}-{high:.2f}{row.cpu_ratio:10.2f}{row.cpu_share:6.2f}",
                        flush=True,
                    )
                rows += new
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
