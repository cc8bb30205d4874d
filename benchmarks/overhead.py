"""What a step costs the host beside the model's own operations, in microseconds per unit and per parameter.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --ranks 64 --peers
    python -m benchmarks.overhead --profile 3

A model of B blocks, each a unit of P parameters of 8 x 8, takes steps with and without the engine, in turn. Everything
it computes is tiny, so the difference is what the engine does: module hooks, saved-tensor hooks, handles, buffers, the
binding of the optimizer. Time is that of this thread on a core, and of all rounds the least, which a busy machine changes
least (but it does, through the caches). From models of several sizes, ``a + B * (u + P * p)`` is fitted to the difference:
``u`` is given per pass, forward and backward, ``p`` per step. With one rank nothing is sent; with more, the process group
is torch's fake one, whose collectives return at once, but whose calls cost something too.
"""

import argparse
import contextlib
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.pages import PARAMETER_TARGET, UNIT_TARGET
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition.engine import ALWAYS_RELEASE_VARIABLE, ZeroEngine
from lightning_zero.tables import new_table, render

WIDTH = 8
SIZES = ((20, 2), (60, 2), (20, 10), (60, 10))
"""Blocks, and parameters of each."""
PHASES = ("forward", "backward", "update")
WARM_UP = 4

Step = Callable[[Tensor], list[float]]


class Block(nn.Module):
    """Products with small matrices, one after the other."""

    def __init__(self, parameters: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="of a process group whose collectives return at once")
    parser.add_argument("--rounds", type=int, default=30, help="counted steps of each competitor")
    parser.add_argument("--peers", action="store_true", help="FSDP2 as well (with --ranks 2 or more)")
    parser.add_argument("--profile", type=int, metavar="STAGE", help="list the functions that take most instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_world(options.ranks):
        if options.profile:
            profile(options.profile, options.ranks)
        else:
            print(table(measure(options.ranks, options.rounds, options.peers), options.ranks))


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Be rank 0 of a world whose collectives return at once; one rank has no process group."""
    os.environ[ALWAYS_RELEASE_VARIABLE] = "1"  # else one rank would shard nothing
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        del os.environ[ALWAYS_RELEASE_VARIABLE]
        if ranks > 1:
            dist.destroy_process_group()


# -- competitors -------------------------------------------------------------------------------------------------------


def model(blocks: int, parameters: int, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(parameters, width) for _ in range(blocks)))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def looped(
    module: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, engine: ZeroEngine | None = None
) -> Step:
    """A step that returns the seconds of its phases."""

    def step(x: Tensor) -> list[float]:
        times = [time.thread_time()]
        with contextlib.nullcontext() if engine is None else engine.step("train", backward_follows=True):
            loss = module(x).square().mean()
        times.append(time.thread_time())
        optimizer.zero_grad()
        with contextlib.nullcontext() if engine is None else engine.backward():
            loss.backward()
        times.append(time.thread_time())
        optimizer.step()
        times.append(time.thread_time())
        return [b - a for a, b in pairwise(times)]

    return step


def plain(module: nn.Module) -> Step:
    return looped(module, adamw(module))


def fsdp2(module: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.children():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return looped(module, adamw(module))


def ours(stage: int) -> Callable[[nn.Module], Step]:
    def make(module: nn.Module) -> Step:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        optimizer = adamw(module)
        config = EngineConfig(stage, 2**20, unit_policy=(Block,))
        return looped(module, optimizer, ZeroEngine(module, Comm(0, ranks, torch.device("cpu")), config, [optimizer]))

    return make


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Overhead:
    """Microseconds beside the plain module's, by phase."""

    per_unit: list[float]
    per_parameter: list[float]

    @property
    def per_pass(self) -> float:
        """For a unit and pass, of forward and backward."""
        return (self.per_unit[0] + self.per_unit[1]) / 2

    @property
    def per_parameter_and_step(self) -> float:
        return sum(self.per_parameter)


def measure(ranks: int, rounds: int, peers: bool = False) -> dict[str, Overhead]:
    makers: dict[str, Callable[[nn.Module], Step]] = {"plain": plain, **{f"stage {s}": ours(s) for s in (1, 2, 3)}}
    if peers and ranks > 1:
        makers["FSDP2"] = fsdp2
    seconds: dict[str, list[list[float]]] = {name: [] for name in makers}
    for size in SIZES:
        found = fastest(makers, size, rounds)
        for name in makers:
            seconds[name].append(found[name])
    rows = torch.tensor([[1.0, blocks, blocks * parameters] for blocks, parameters in SIZES], dtype=torch.float64)
    overheads = {}
    for name in makers:
        if name != "plain":
            extra = 1e6 * (torch.tensor(seconds[name], dtype=torch.float64) - torch.tensor(seconds["plain"]))
            _, *fitted = torch.linalg.lstsq(rows, extra).solution.tolist()
            overheads[name] = Overhead(*fitted)
    return overheads


def fastest(
    makers: dict[str, Callable[[nn.Module], Step]], size: tuple[int, int], rounds: int, width: int = WIDTH
) -> dict[str, list[float]]:
    """Seconds of each phase, the least of all rounds, of competitors that take turns."""
    x = torch.randn(2, width, requires_grad=True)
    steps = {name: make(model(*size, width)) for name, make in makers.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in makers}
    for turn in range(WARM_UP + rounds):
        for name, step in steps.items():
            seconds = step(x)
            if turn >= WARM_UP:
                times[name].append(seconds)
    return {name: [min(column) for column in zip(*found)] for name, found in times.items()}


def table(overheads: dict[str, Overhead], ranks: int) -> str:
    rows = new_table(*(f"{phase}\n/ unit" for phase in PHASES), "a unit\nand pass", "a parameter\nand step")
    for name, it in overheads.items():
        cells = [*it.per_unit, it.per_pass, it.per_parameter_and_step]
        rows.add_row(name, *(f"{value:.1f}" for value in cells))
    sent = "nothing is sent" if ranks == 1 else f"rank 0 of {ranks}, collectives return at once"
    return render(
        rows,
        [f"Host time beside the plain module's, in microseconds ({sent})"],
        [f"Targets: {UNIT_TARGET:g} for a unit and pass, {PARAMETER_TARGET:g} for a parameter and step."],
    )


def profile(stage: int, ranks: int, steps: int = 50) -> None:
    """Where the time of the engine goes, by function."""
    step, x = ours(stage)(model(60, 10)), torch.randn(2, WIDTH, requires_grad=True)
    for _ in range(WARM_UP):
        step(x)
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(steps):
        step(x)
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
