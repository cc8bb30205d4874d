"""Time and memory of saving and loading a GPT with AdamW, against torch's FSDP2 with DCP, all in one set of processes.

    python benchmarks/checkpoint.py --ranks 2 --rounds 5 --json result.json

Every competitor trains a step of the same model, saves, builds everything anew and loads. They take turns (A B A B ...),
so that a change of the disk's speed meets all of them. Reported are medians, over ranks the slowest and the largest; MB
are growth of memory that the kernel cannot take back, at its peak. What is read was just written, so it comes from the
page cache. All loaded states are compared with what was saved.
"""

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_zero.checkpoint.file import FileCheckpointIO
from lightning_zero.checkpoint.folder import FolderCheckpoint, save_folder
from lightning_zero.checkpoint.training import from_folder, load_optimizers, to_folder
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.optimizer_state import StateForm

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.competitors import adamw
from benchmarks.models import GPT

HOST = StateDictOptions(cpu_offload=True)


class Meter:
    """Seconds and peak growth of anonymous memory of what happens inside."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.megabytes: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        ctypes.CDLL(None).malloc_trim(0)
        start, most, ended = anonymous(), [anonymous()], threading.Event()

        def watch() -> None:
            while not ended.wait(0.01):
                most[0] = max(most[0], anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        dist.barrier()
        began = time.perf_counter()
        yield
        dist.barrier()
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)
        ended.set()
        watcher.join()
        self.megabytes.setdefault(what, []).append(max(most[0], anonymous()) - start)


def anonymous() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    raise RuntimeError("/proc/self/status has no RssAnon")


def fsdp2(path: str, meter: Meter) -> tuple[float, float]:
    def build() -> tuple[Any, torch.optim.Optimizer]:
        model = GPT()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), adamw(model)

    model, optimizer = build()
    model(batch()).backward()
    optimizer.step()
    with meter("save"):
        state = {
            "state_dict": get_model_state_dict(model, options=HOST),
            "optimizer_0": get_optimizer_state_dict(model, optimizer, options=HOST),
        }
        dcp.save(state, checkpoint_id=path)
    saved = checksum(model, optimizer)
    del state, model, optimizer
    torch.manual_seed(7)
    model, optimizer = build()
    with meter("load"):
        weights = {"state_dict": get_model_state_dict(model)}
        dcp.load(weights, checkpoint_id=path)
        model.load_state_dict(weights["state_dict"])
        state = {"optimizer_0": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, state["optimizer_0"], options=HOST)
    return saved, checksum(model, optimizer)


def ours(stage: int, form: str) -> Callable[[str, Meter], tuple[float, float]]:
    def engine_of(model: GPT) -> tuple[ZeroEngine, torch.optim.Optimizer, Comm]:
        comm = Comm(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        optimizer = adamw(model)
        return ZeroEngine(model, comm, EngineConfig(stage=stage, unit_bytes=32 * 2**20), [optimizer]), optimizer, comm

    def run(path: str, meter: Meter) -> tuple[float, float]:
        model = GPT()
        engine, optimizer, comm = engine_of(model)
        first, file = comm.rank == 0, FileCheckpointIO()
        with engine.step("train", backward_follows=True):
            loss = model(batch())
        with engine.backward():
            loss.backward()
        optimizer.step()
        group = comm.storage_group
        with meter("save"):
            weights: Any = model.state_dict(keep_vars=True)
            if form == "full":
                weights = engine.whole_state_dict(weights, keep=first)
            with engine.state_as(StateForm.SHARDS if form == "sharded" else StateForm.WHOLE if first else StateForm.NOTHING):
                checkpoint = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
            if form == "sharded":
                save_folder(*to_folder(checkpoint, model, engine, [optimizer]), path, "ab", group)
            elif first:
                file.save_checkpoint(checkpoint, path)
        saved = checksum(model, optimizer, engine)
        engine.close()
        del engine, optimizer, checkpoint, weights
        torch.manual_seed(7)
        model = GPT()
        with meter("load weights"):
            if form == "sharded":
                checkpoint = from_folder(FolderCheckpoint(path), model.state_dict())
            else:
                checkpoint = file.load_checkpoint(path)
            model.load_state_dict(checkpoint["state_dict"])
        engine, optimizer, comm = engine_of(model)
        with meter("load optimizer"):
            load_optimizers(checkpoint, [optimizer], model, engine, torch.device("cpu"))
        del checkpoint
        weights_took, optimizer_took = (meter.seconds.pop(what) for what in ("load weights", "load optimizer"))
        meter.seconds.setdefault("load", []).append(weights_took[0] + optimizer_took[0])
        grown = [meter.megabytes.pop(what)[0] for what in ("load weights", "load optimizer")]
        meter.megabytes.setdefault("load", []).append(max(grown))
        loaded = checksum(model, optimizer, engine)
        engine.close()
        return saved, loaded

    return run


COMPETITORS = {
    "FSDP2 + DCP": fsdp2,
    "zero-3 sharded": ours(3, "sharded"),
    "zero-2 sharded": ours(2, "sharded"),
    "zero-3 full": ours(3, "full"),
}


def batch() -> torch.Tensor:
    return torch.arange(2 * 65).view(2, 65) % 8192


def checksum(model: Any, optimizer: torch.optim.Optimizer, engine: ZeroEngine | None = None) -> float:
    """Of this rank's shards and their state."""
    if engine is None:
        tensors = [p.to_local() for p in model.parameters()]
    else:
        tensors = [unit.main for unit in engine.units]
    for state in optimizer.state.values():
        tensors += [s.to_local() if hasattr(s, "to_local") else s for s in state.values() if s.dim()]
    return sum(float(t.detach().double().sum()) for t in tensors)


def worker(rank: int, options: argparse.Namespace, folder: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", options.ranks), rank=rank, world_size=options.ranks
    )
    meters = {name: Meter() for name in COMPETITORS}
    sizes: dict[str, float] = {}
    for turn in range(options.rounds + 1):
        if turn == 1:
            meters = {name: Meter() for name in COMPETITORS}  # the first round warms up
        for name, compete in COMPETITORS.items():
            torch.manual_seed(0)
            path = f"{folder}/checkpoint"
            saved, loaded = compete(path, meters[name])
            if saved != loaded:
                raise AssertionError(f"{name}: loaded {loaded}, saved {saved}")
            dist.barrier()
            if rank == 0:
                files = [Path(path)] if os.path.isfile(path) else list(Path(path).iterdir())
                sizes[name] = sum(file.stat().st_size for file in files) / 1e6
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            dist.barrier()
    mine = {name: (meter.seconds, meter.megabytes) for name, meter in meters.items()}
    everyone: list[Any] = [None] * options.ranks
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        queue.put({"ranks": everyone, "megabytes on disk": sizes})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--folder", help="where to write (default: the folder for temporary files)")
    parser.add_argument("--json", help="write all measurements to this file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        workers = mp.spawn(worker, (options, folder, queue), options.ranks, join=False)
        result = queue.get()
        workers.join()
    print(f"{platform.machine()}, {os.cpu_count()} cores, {options.ranks} ranks, torch {torch.__version__}")
    print(f"{'':18}{'save s':>9}{'load s':>9}{'save MB':>9}{'load MB':>9}{'disk MB':>9}")
    for name in COMPETITORS:
        cells = []
        for kind in (0, 1):
            for what in ("save", "load"):
                rounds = zip(*(rank[name][kind][what] for rank in result["ranks"]), strict=True)
                cells.append(statistics.median(max(values) for values in rounds))
        print(f"{name:18}{cells[0]:9.2f}{cells[1]:9.2f}{cells[2]:9.0f}{cells[3]:9.0f}{result['megabytes on disk'][name]:9.0f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
