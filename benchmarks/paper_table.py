"""The memory table of the ZeRO paper (SC 20, figure 1), measured: one rank of 64, built and stepped for real.

    python benchmarks/paper_table.py
    python benchmarks/paper_table.py --ranks 1024 --billions 7.5 --small-billions 0.1

The paper gives bytes of model states per rank for 7.5 billion parameters on 64 ranks, 16-bit compute and Adam: 120, 31.4,
16.6 and 1.9 GB for plain data parallelism and stages 1, 2 and 3. Here this process is rank 0 of a world whose collectives
return at once (torch's fake process group): everything that rank holds is allocated, and nothing else. Stage 3 runs with all
of the parameters; the whole model is never in memory, because its pages are only reserved until a layer is sharded. Stages
1 and 2 hold whole parameters, so they run with a smaller model, and their bytes per parameter are given for the paper's.
"""

import argparse
import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.estimate import short_count
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.precision import ZeroPrecision
from lightning_zero.tables import new_table, render

PAPER = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}
LAYERS = 64


@dataclass
class Measured:
    """What rank 0 holds after a step."""

    stage: int
    parameters: int
    states: int
    """Bytes of parameters, gradients, masters and optimizer state."""
    buffers: int
    """Bytes of flat buffers, at their peak."""
    resident: float
    """Bytes by which the process has grown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--billions", type=float, default=7.5, help="parameters at stage 3 (default: the paper's)")
    parser.add_argument("--small-billions", type=float, default=0.5, help="parameters at stages 1 and 2")
    arguments = parser.parse_args()
    sizes = {1: arguments.small_billions, 2: arguments.small_billions, 3: arguments.billions}
    with fake_world(arguments.ranks):
        measured = [measure(stage, 1e9 * billions, arguments.ranks) for stage, billions in sizes.items()]
    print(table(measured, arguments.ranks))


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(stage: int, parameters: float, ranks: int) -> Measured:
    """Build the model, shard it, and step once."""
    width = round((parameters / LAYERS) ** 0.5)
    module = empty_layers(width)
    before = psutil.Process().memory_info().rss
    optimizer = torch.optim.AdamW(module.parameters())
    dtypes = ZeroPrecision("bf16-mixed").parameter_dtypes(module)
    config = EngineConfig(stage, unit_bytes=width * width * 4, dtypes=dtypes)
    engine = ZeroEngine(module, Comm(0, ranks, torch.device("cpu")), config, [optimizer])
    step(engine, module, optimizer, width, stage)
    stats = engine.memory_stats()
    resident = psutil.Process().memory_info().rss - before
    states = sum(nbytes for kind, nbytes in stats["now"].items() if kind != "buffers")
    count = sum(p.numel() for p in module.parameters())
    # Not engine.close(): that would make the module whole.
    return Measured(stage, count, states, stats["peak"].get("buffers", 0), resident)


def empty_layers(width: int) -> nn.Sequential:
    """A stack of square layers whose memory nobody has touched, so that it is reserved but not there."""
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    return module.to_empty(device="cpu")


def step(engine: ZeroEngine, module: nn.Sequential, optimizer: torch.optim.Optimizer, width: int, stage: int) -> None:
    batch = torch.zeros(1, width, dtype=torch.bfloat16)
    with engine.step("train", backward_follows=True):
        x = batch.requires_grad_()
        for layer in track(module, f"stage {stage}, forward", transient=True):
            x = layer(x)
        loss = x.sum()
    with engine.backward():
        loss.backward()
    optimizer.step()


def table(measured: list[Measured], ranks: int) -> str:
    rows = new_table("parameters\nmeasured", "measured\nB/parameter", "7.5B,\nGB", "paper,\nGB", "buffers,\nGB", "process\ngrew, GB")
    for it in measured:
        each = it.states / it.parameters
        rows.add_row(
            f"stage {it.stage}", short_count(it.parameters), f"{each:.3f}", f"{each * 7.5:.1f}",
            f"{PAPER[it.stage]}" if ranks == 64 else "", f"{it.buffers / 1e9:.2f}", f"{it.resident / 1e9:.2f}",
        )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return render(
        rows,
        [f"Model states on rank 0 of {ranks}: bf16 compute, fp32 masters, AdamW, after one step"],
        [f"The process has never held more than {peak:.1f} GB, of which the libraries are about 0.5 GB."],
    )


if __name__ == "__main__":
    main()
