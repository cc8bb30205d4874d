"""Time of a training step of a 30M-parameter GPT, against peers, all in one set of processes.

    python benchmarks/step_time.py --ranks 2 --rounds 12 --json result.json

Every competitor has its own copy of the model in every rank; they take turns (A B A B ...), so that a change of the
machine's speed meets all of them. Reported are medians of a competitor's time over DDP's in the same round.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition.engine import ZeroEngine


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(
        self, width: int = 512, layers: int = 8, heads: int = 8, vocabulary: int = 8192, context: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


Step = Callable[[Tensor], float]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def loop(forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor) -> float:
        loss = forward(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def single(model: GPT) -> Step:
    return loop(model, adamw(model.parameters()))


def ddp(model: GPT) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return loop(wrapped, adamw(model.parameters()))


def zero_redundancy(model: GPT) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    return loop(wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True))


def fsdp2(reshard: bool) -> Callable[[GPT], Step]:
    def make(model: GPT) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return loop(model, adamw(model.parameters()))

    return make


def ours(stage: int, **config: Any) -> Callable[[GPT], Step]:
    def make(model: GPT) -> Step:
        world = dist.get_world_size()
        comm = Comm(dist.get_rank(), world, torch.device("cpu"))
        optimizer = adamw(model.parameters())
        engine = ZeroEngine(model, comm, EngineConfig(stage=stage, **{"unit_bytes": 32 * 2**20, **config}), [optimizer])

        def step(tokens: Tensor) -> float:
            with engine.step("train", backward_follows=True):
                loss = model(tokens)
            optimizer.zero_grad()
            with engine.backward():
                loss.backward()
            optimizer.step()
            return float(loss.detach())

        return step

    return make


def competitors(ranks: int) -> dict[str, Callable[[GPT], Step]]:
    if ranks == 1:
        return {"plain": single, **{f"zero-{s}": ours(s) for s in (1, 2, 3)}}
    return {
        "DDP": ddp,
        "ZeroRedundancyOptimizer": zero_redundancy,
        "FSDP2": fsdp2(True),
        "FSDP2 no reshard": fsdp2(False),
        **{f"zero-{s}": ours(s) for s in (1, 2, 3)},
    }


def worker(rank: int, options: argparse.Namespace, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, options.ranks), rank=rank, world_size=options.ranks)
    chosen = {n: c for n, c in competitors(options.ranks).items() if not options.only or n in options.only}
    steps: dict[str, Step] = {}
    for name, make in chosen.items():
        torch.manual_seed(0)
        steps[name] = make(GPT())
    generator = torch.Generator().manual_seed(rank)
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.warmup + options.rounds):
        tokens = torch.randint(0, 8192, (options.batch, 129), generator=generator)
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(steps[name](tokens))
            dist.barrier()
            if turn >= options.warmup:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        queue.put({"times": times, "losses": {n: v[-1] for n, v in losses.items()}})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="counted steps of each competitor")
    parser.add_argument("--warmup", type=int, default=3, help="steps before counting begins")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens on each rank")
    parser.add_argument("--only", nargs="*", help="names of competitors to run")
    parser.add_argument("--json", help="write times and ratios to this file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = mp.spawn(worker, (options, os.path.join(folder, "store"), queue), options.ranks, join=False)
        result = queue.get()
        workers.join()
    times, base = result["times"], next(iter(result["times"]))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {options.ranks} ranks, 1 thread each, torch {torch.__version__}, fp32"
    )
    print(f"{'':26}{'s / step':>9}{f'/ {base}':>9}{'quartiles':>16}{'last loss':>11}")
    ratios = {}
    for name, seconds in times.items():
        paired = sorted(a / b for a, b in zip(seconds, times[base], strict=True))
        ratios[name] = statistics.median(paired)
        low, high = paired[len(paired) // 4], paired[3 * len(paired) // 4]
        print(
            f"{name:26}{statistics.median(seconds):9.3f}{ratios[name]:9.3f}{f'{low:.3f} - {high:.3f}':>16}"
            f"{result['losses'][name]:11.5f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**result, "ratios": ratios, "options": vars(options)}, file, indent=1)


if __name__ == "__main__":
    main()
